# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""A disk update that fails in the draft model takes the target back as well.

Real scheduler component, workers' methods, WeightUpdater and loaders; tiny Qwen3
models with random weights on disk stand for target and draft.
"""

import functools
import hashlib
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

register_cuda_ci(est_time=40, stage="base-b", runner_config="1-gpu-large")

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

# Fails in the middle when it is updated with weights of CONFIG.
WIDE = {**CONFIG, "head_dim": 128}


def make_weights(seed, config=CONFIG):
    """Random Qwen3 weights in Hugging Face names: {name: bfloat16 CPU tensor}."""
    hidden, inter, head = (
        config[k] for k in ("hidden_size", "intermediate_size", "head_dim")
    )
    q_out = config["num_attention_heads"] * head
    kv_out = config["num_key_value_heads"] * head
    shapes = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(config["num_hidden_layers"]):
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


def save_checkpoint(folder, weights, config=CONFIG):
    """Write `weights` as two shards, config included; returns the folder as str."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    half = len(names) // 2
    for i, part in enumerate((names[:half], names[half:])):
        tensors = {name: weights[name] for name in part}
        save_file(tensors, folder / f"model-{i}.safetensors")
    return str(folder)


@unittest.skipUnless(
    torch.cuda.is_available() or importlib.util.find_spec("vllm"),
    "building RotaryEmbedding without CUDA needs vllm._custom_ops",
)
class TestDiskUpdateWithDraft(CustomTestCase):
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
        self.addCleanup(torch.set_default_dtype, torch.get_default_dtype())
        self.dir = Path(tempfile.mkdtemp(dir=self.root))
        self.path_b = save_checkpoint(self.dir / "b", make_weights(1))
        self.path_wide = save_checkpoint(
            self.dir / "wide", make_weights(2, WIDE), config=WIDE
        )

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
        runner.weight_updater = WeightUpdater(
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
        return runner

    def state(self, runner):
        from sglang.srt.runtime_context import get_model

        tensors = [*runner.model.named_parameters(), *runner.model.named_buffers()]
        return {
            "model_config": dict(vars(runner.model_config)),
            "load_config": runner.load_config,
            "published": (get_model().model_path, get_model().load_format),
            "bytes": {
                name: hashlib.sha256(
                    tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
                ).hexdigest()
                for name, tensor in tensors
            },
        }

    def update(self, target, drafts, path):
        from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqInput
        from sglang.srt.managers.scheduler_components.weight_updater import (
            SchedulerWeightUpdaterManager,
        )
        from sglang.srt.managers.tp_worker import BaseTpWorker
        from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

        tp_worker = SimpleNamespace(model_runner=target)
        tp_worker.update_weights_from_disk = functools.partial(
            BaseTpWorker.update_weights_from_disk, tp_worker
        )
        draft_worker = SimpleNamespace(
            draft_worker=SimpleNamespace(draft_runners=drafts)
        )
        draft_worker.update_weights_from_disk = functools.partial(
            BaseSpecWorker.update_weights_from_disk, draft_worker
        )
        manager = SchedulerWeightUpdaterManager(
            tp_worker=tp_worker,
            draft_worker=draft_worker,
            tp_cpu_group=None,
            memory_saver_adapter=None,
            flush_cache=lambda **kwargs: True,
            is_fully_idle=lambda **kwargs: True,
        )
        return manager.update_weights_from_disk(
            UpdateWeightFromDiskReqInput(model_path=path, load_format="safetensors")
        )

    def test_all_runners_are_updated(self):
        draft, target = (self.start(self.path_a, "auto") for _ in range(2))
        output = self.update(target, [draft], self.path_b)
        self.assertTrue(output.success, output.message)
        for runner in (target, draft):
            self.assertEqual(runner.model_config.model_path, self.path_b)
        self.assertEqual(self.state(target)["bytes"], self.state(draft)["bytes"])

    def test_failed_draft_takes_the_target_back(self):
        draft = self.start(self.path_wide, "auto")
        target = self.start(self.path_a, "auto")
        before = self.state(target), self.state(draft)
        output = self.update(target, [draft], self.path_b)
        self.assertFalse(output.success)
        self.assertIn("Draft model: Failed to update", output.message)
        self.assertIn(
            f"Target model: Rolled back: the weights of {self.path_a}", output.message
        )
        self.assertEqual((self.state(target), self.state(draft)), before)

    def test_failed_second_draft_takes_the_first_back(self):
        wide = self.start(self.path_wide, "auto")
        draft = self.start(self.path_a, "auto")
        target = self.start(self.path_a, "auto")
        runners = (target, draft, wide)
        before = [self.state(runner) for runner in runners]
        output = self.update(target, [draft, wide], self.path_b)
        self.assertFalse(output.success)
        self.assertIn(
            f"Draft model: Rolled back: the weights of {self.path_a}", output.message
        )
        self.assertEqual([self.state(runner) for runner in runners], before)

    def test_target_that_cannot_be_taken_back_is_reported(self):
        gone = save_checkpoint(self.dir / "gone", make_weights(5))
        draft = self.start(self.path_wide, "auto")
        target = self.start(gone, "auto")
        shutil.rmtree(gone)
        with mock.patch("huggingface_hub.constants.HF_HUB_OFFLINE", True):
            output = self.update(target, [draft], self.path_b)
        self.assertFalse(output.success)
        self.assertIn(f"Target model: {gone} could not be loaded again", output.message)
        self.assertEqual(target.model_config.model_path, self.path_b)


if __name__ == "__main__":
    unittest.main()
