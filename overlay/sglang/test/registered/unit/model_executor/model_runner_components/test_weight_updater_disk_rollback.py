# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""A failed update_weights_from_disk leaves the engine as it was, and says what it did.

Real WeightUpdater, real loaders, a tiny Qwen3 with random weights on disk.
"""

import functools
import importlib.util
import json
import shutil
import socket
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from safetensors.torch import save_file

from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.test_utils import CustomTestCase

register_cuda_ci(est_time=40, stage="base-b", runner_config="1-gpu-small")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def make_weights(seed):
    """Random Qwen3 weights in Hugging Face names: {name: bfloat16 CPU tensor}."""
    hidden, inter, head = (
        CONFIG[k] for k in ("hidden_size", "intermediate_size", "head_dim")
    )
    q_out = CONFIG["num_attention_heads"] * head
    kv_out = CONFIG["num_key_value_heads"] * head
    shapes = {
        "model.embed_tokens.weight": (CONFIG["vocab_size"], hidden),
        "lm_head.weight": (CONFIG["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(CONFIG["num_hidden_layers"]):
        layer_shapes = {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_norm": (head,),
            "self_attn.k_norm": (head,),
            "self_attn.q_proj": (q_out, hidden),
            "self_attn.k_proj": (kv_out, hidden),
            "self_attn.v_proj": (kv_out, hidden),
            "self_attn.o_proj": (hidden, q_out),
            "mlp.gate_proj": (inter, hidden),
            "mlp.up_proj": (inter, hidden),
            "mlp.down_proj": (hidden, inter),
        }
        for name, shape in layer_shapes.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = shape
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return {
        name: torch.randn(
            shape, generator=generator, dtype=torch.float32, device="cpu"
        ).bfloat16()
        for name, shape in shapes.items()
    }


def save_checkpoint(folder, weights, pt=False):
    """Write `weights` as two shards, config included; returns the folder as str."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    names = sorted(weights)
    half = len(names) // 2
    for i, part in enumerate((names[:half], names[half:])):
        tensors = {name: weights[name] for name in part}
        if pt:
            torch.save(tensors, folder / f"model-{i}.pt")
        else:
            save_file(tensors, folder / f"model-{i}.safetensors")
    return str(folder)


@unittest.skipUnless(
    torch.cuda.is_available() or importlib.util.find_spec("vllm"),
    "building RotaryEmbedding without CUDA needs vllm._custom_ops",
)
class TestDiskUpdateRollback(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed.parallel_state import (
            init_distributed_environment,
            initialize_model_parallel,
        )
        from sglang.srt.layers.dp_attention import initialize_dp_attention

        cls.root = Path(tempfile.mkdtemp())
        cls.path_a = save_checkpoint(cls.root / "a", make_weights(0))
        server_args = cls.publish(cls.path_a, "auto")
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            port = sock.getsockname()[1]
        init_distributed_environment(
            backend="nccl" if DEVICE == "cuda" else "gloo",
            world_size=1,
            rank=0,
            local_rank=0,
            distributed_init_method=f"tcp://127.0.0.1:{port}",
        )
        initialize_model_parallel()
        initialize_dp_attention(server_args, ModelConfig(cls.path_a, dtype="bfloat16"))

    @classmethod
    def tearDownClass(cls):
        from sglang.srt.distributed.parallel_state import (
            destroy_distributed_environment,
            destroy_model_parallel,
        )
        from sglang.srt.runtime_context import reset_context

        destroy_model_parallel()
        destroy_distributed_environment()
        reset_context()
        shutil.rmtree(cls.root, ignore_errors=True)

    @staticmethod
    def publish(model_path, load_format):
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import ServerArgs

        server_args = ServerArgs(
            model_path=model_path, load_format=load_format, device=DEVICE
        )
        publish(server_args, role="test")
        return server_args

    def setUp(self):
        super().setUp()
        # set_default_torch_dtype does not restore when its body raises
        self.addCleanup(torch.set_default_dtype, torch.get_default_dtype())
        self.dir = Path(tempfile.mkdtemp(dir=self.root))
        self.start(self.path_a, "auto")
        self.path_b = save_checkpoint(self.dir / "b", make_weights(1))

    def start(self, model_path, load_format):
        """What a scheduler does at start-up, as far as weights are concerned."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.model_executor.model_runner_components.weight_updater import (
            WeightUpdater,
        )
        from sglang.srt.model_loader.loader import get_model_loader

        runner = SimpleNamespace(server_args=self.publish(model_path, load_format))
        runner.model_config = ModelConfig(model_path, dtype="bfloat16")
        runner.load_config = LoadConfig(load_format=load_format)
        runner.model = get_model_loader(
            runner.load_config, runner.model_config
        ).load_model(
            model_config=runner.model_config, device_config=DeviceConfig(DEVICE)
        )
        self.runner = runner
        self.updater = WeightUpdater(
            tp_rank=0,
            device=DEVICE,
            gpu_id=0,
            model_config=runner.model_config,
            custom_weight_loaders={},
            get_model=lambda: runner.model,
            update_model_fields=functools.partial(
                ModelRunner.update_model_fields, runner
            ),
            recapture_cuda_graph=lambda: self.fail("unexpected graph recapture"),
            get_model_runner=lambda: runner,
        )

    def fields(self):
        """Everything but tensors that a disk update may change."""
        from sglang.srt.runtime_context import get_model, get_server_args

        return {
            "model_config": dict(vars(self.runner.model_config)),
            "load_config": self.runner.load_config,
            "published path": get_model().model_path,
            "published format": get_model().load_format,
            "server args": (
                get_server_args().model_path,
                get_server_args().load_format,
            ),
            "default dtype": torch.get_default_dtype(),
        }

    def tensors(self):
        model = self.runner.model
        named = [*model.named_parameters(), *model.named_buffers()]
        return {name: tensor.detach().clone() for name, tensor in named}

    def changed(self, before):
        after = self.tensors()
        self.assertEqual(before.keys(), after.keys())
        return [name for name in before if not torch.equal(before[name], after[name])]

    def update(self, path, load_format="auto", **kwargs):
        return self.updater.update_weights_from_disk(str(path), load_format, **kwargs)

    def assert_failed_update_changes_nothing(self, path, load_format="auto"):
        """Returns the message and the tensors that the failed load had overwritten."""
        tensors, fields = self.tensors(), self.fields()
        model, load_weights = self.runner.model, self.runner.model.load_weights
        overwritten = []

        def spy(weights):
            try:
                return load_weights(weights)
            except Exception:
                overwritten.extend(self.changed(tensors))
                raise

        with mock.patch.object(model, "load_weights", spy):
            success, message = self.update(path, load_format)
        self.assertFalse(success, message)
        self.assertEqual(self.changed(tensors), [], message)
        self.assertEqual(self.fields(), fields, message)
        return message, overwritten

    def assert_rolled_back(self, message, overwritten, path):
        self.assertGreater(len(overwritten), 3, "the failed load changed nothing")
        self.assertLess(len(overwritten), len(self.tensors()))
        self.assertIn(f"Rolled back: the weights of {path} were loaded again", message)

    def assert_holds(self, weights):
        """The model is what a cold load of `weights` gives."""
        params = dict(self.runner.model.named_parameters())
        for layer in range(CONFIG["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            for fused, parts in {
                "self_attn.qkv_proj.weight": ("q_proj", "k_proj", "v_proj"),
                "mlp.gate_up_proj.weight": ("gate_proj", "up_proj"),
            }.items():
                module = fused.split(".")[0]
                expected = torch.cat(
                    [weights[f"{prefix}{module}.{part}.weight"] for part in parts]
                )
                self.assertTrue(torch.equal(params[prefix + fused].cpu(), expected))
        for name, expected in weights.items():
            if name in params:
                self.assertTrue(torch.equal(params[name].cpu(), expected), name)

    def truncated(self):
        path = Path(save_checkpoint(self.dir / "truncated", make_weights(2)))
        shard = path / "model-1.safetensors"
        shard.write_bytes(shard.read_bytes()[:-1000])
        return path

    def wrong_shape(self):
        weights = make_weights(3)
        name = "model.layers.1.mlp.down_proj.weight"
        weights[name] = torch.zeros(64, 256, dtype=torch.bfloat16, device="cpu")
        return Path(save_checkpoint(self.dir / "wrong_shape", weights))

    def test_good_update_moves_every_field(self):
        from sglang.srt.runtime_context import get_model

        success, message = self.update(self.path_b, "safetensors")
        self.assertTrue(success, message)
        self.assert_holds(make_weights(1))
        self.assertEqual(self.runner.model_config.model_path, self.path_b)
        self.assertEqual(self.runner.load_config.load_format, "safetensors")
        self.assertEqual(get_model().model_path, self.path_b)
        self.assertEqual(get_model().load_format, "safetensors")

    def test_truncated_shard_rolls_back(self):
        message, overwritten = self.assert_failed_update_changes_nothing(
            self.truncated()
        )
        self.assert_rolled_back(message, overwritten, self.path_a)
        self.assertIn("SafetensorError", message)
        self.assert_holds(make_weights(0))

    def test_wrong_shape_in_the_middle_rolls_back(self):
        message, overwritten = self.assert_failed_update_changes_nothing(
            self.wrong_shape()
        )
        self.assert_rolled_back(message, overwritten, self.path_a)
        self.assertIn("AssertionError", message)
        self.assert_holds(make_weights(0))

    def test_rollback_goes_to_the_last_good_update(self):
        self.assertTrue(self.update(self.path_b)[0])
        message, overwritten = self.assert_failed_update_changes_nothing(
            self.wrong_shape()
        )
        self.assert_rolled_back(message, overwritten, self.path_b)
        self.assert_holds(make_weights(1))

    def test_rollback_reads_the_old_load_format(self):
        path = save_checkpoint(self.dir / "pt", make_weights(4), pt=True)
        self.start(path, "pt")
        message, overwritten = self.assert_failed_update_changes_nothing(
            self.wrong_shape(), "safetensors"
        )
        self.assert_rolled_back(message, overwritten, path)
        self.assert_holds(make_weights(4))

    def test_update_after_a_failed_one_works(self):
        self.assertFalse(self.update(self.truncated())[0])
        self.assertTrue(self.update(self.path_b)[0])
        self.assert_holds(make_weights(1))

    def assert_fails_before_the_first_write(self, path, load_format="auto"):
        with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
            message, overwritten = self.assert_failed_update_changes_nothing(
                path, load_format
            )
        self.assertIn("Failed to get", message)
        self.assertNotIn("Rolled back", message)
        self.assertEqual(overwritten, [])

    def empty(self):
        path = self.dir / "empty"
        path.mkdir()
        return path

    def test_missing_path(self):
        self.assert_fails_before_the_first_write(self.dir / "no" / "such" / "path")

    def test_empty_folder(self):
        self.assert_fails_before_the_first_write(self.empty())

    def test_load_format_that_cannot_update(self):
        self.assert_fails_before_the_first_write(self.path_b, "dummy")

    def test_unknown_load_format(self):
        self.assert_fails_before_the_first_write(self.path_b, "no-such-format")

    def test_quantization_set_by_flash_rl_is_taken_back(self):
        self.assert_fails_before_the_first_write(self.empty(), "flash_rl")

    def test_failed_rollback_is_reported_not_hidden(self):
        gone = self.dir / "gone"
        save_checkpoint(gone, make_weights(5))
        self.start(str(gone), "auto")
        shutil.rmtree(gone)
        fields, tensors = self.fields(), self.tensors()
        success, message = self.update(self.truncated())
        self.assertFalse(success)
        self.assertNotEqual(self.changed(tensors), [])
        self.assertEqual(self.fields(), fields)
        self.assertIn("SafetensorError", message)
        self.assertIn(f"Rolling back to {gone} failed as well", message)
        self.assertNotIn("loaded again", message)
        # a later good update heals it
        self.assertTrue(self.update(self.path_b)[0])
        self.assert_holds(make_weights(1))

    def test_dummy_weights_cannot_be_rolled_back(self):
        self.start(self.path_a, "dummy")
        fields = self.fields()
        success, message = self.update(self.truncated())
        self.assertFalse(success)
        self.assertIn("DummyModelLoader", message)
        self.assertIn("failed as well", message)
        self.assertEqual(self.fields(), fields)

    def test_eplb_still_raises_when_experts_cannot_be_restored(self):
        from sglang.srt.eplb.eplb_manager import update_expert_location_with_recovery
        from sglang.srt.runtime_context import get_context

        path = str(self.truncated())
        get_context().override("test", model_path=path)
        self.runner.model_config.model_path = path
        self.runner.model.routed_experts_weights_of_layer = {}
        with self.assertRaises(Exception) as caught:
            update_expert_location_with_recovery(
                expert_location_updater=SimpleNamespace(update=lambda *a, **k: {0: 1}),
                model=self.runner.model,
                new_expert_location_metadata=None,
                update_layer_ids=[0],
                nnodes=1,
                tp_rank=0,
                expert_backup_client=None,
                update_weights_from_disk_callable=self.updater.update_weights_from_disk,
                ep_dispatch_algorithm="static",
                init_lplb_solvers_callable=lambda: None,
            )
        self.assertEqual(type(caught.exception).__name__, "SafetensorError")


if __name__ == "__main__":
    unittest.main()
