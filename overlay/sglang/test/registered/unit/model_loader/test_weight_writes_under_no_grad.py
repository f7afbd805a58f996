# SPDX-License-Identifier: Apache-2.0
# Copyright 2026 The fp8-colocate authors
"""Every in-place write of a weight happens with grad mode off, whoever calls.

Tiny Qwen3 and Qwen3-MoE models whose parameters all require grad go through the
real loaders and update paths with grad mode on. A dispatch mode sees each
mutating op that reaches the storage of a parameter or buffer.
"""

import concurrent.futures
import contextlib
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
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.test.ci.ci_register import register_cuda_ci
from sglang.test.test_utils import CustomTestCase

register_cuda_ci(est_time=60, stage="base-b", runner_config="1-gpu-small")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DENSE = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
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
MOE = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 128,
    "num_experts": 2,
    "num_experts_per_tok": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
BLOCK_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
# name: (config, --quantization)
MODELS = {
    "dense": (DENSE, None),
    "dense, online fp8": (DENSE, "fp8"),
    "dense, block fp8": ({**DENSE, "quantization_config": BLOCK_FP8}, None),
    "moe": (MOE, None),
    "moe, online fp8": (MOE, "fp8"),
    "moe, block fp8": ({**MOE, "quantization_config": BLOCK_FP8}, None),
}


def weight_shapes(config):
    hidden, head = config["hidden_size"], config["head_dim"]
    q_out = config["num_attention_heads"] * head
    kv_out = config["num_key_value_heads"] * head
    layer = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_norm": (head,),
        "self_attn.k_norm": (head,),
        "self_attn.q_proj": (q_out, hidden),
        "self_attn.k_proj": (kv_out, hidden),
        "self_attn.v_proj": (kv_out, hidden),
        "self_attn.o_proj": (hidden, q_out),
    }
    mlps, inter = ["mlp"], config["intermediate_size"]
    if "num_experts" in config:
        inter = config["moe_intermediate_size"]
        layer["mlp.gate"] = (config["num_experts"], hidden)
        mlps = [f"mlp.experts.{i}" for i in range(config["num_experts"])]
    for mlp in mlps:
        layer[f"{mlp}.gate_proj"] = layer[f"{mlp}.up_proj"] = (inter, hidden)
        layer[f"{mlp}.down_proj"] = (hidden, inter)
    shapes = {
        "model.embed_tokens": (config["vocab_size"], hidden),
        "lm_head": (config["vocab_size"], hidden),
        "model.norm": (hidden,),
        **{f"model.layers.0.{name}": shape for name, shape in layer.items()},
    }
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def make_weights(config, requires_grad=False):
    """Random weights in Hugging Face names, block FP8 where the config says so."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    weights = {}
    for name, shape in weight_shapes(config).items():
        weight = torch.randn(
            shape, generator=generator, dtype=torch.float32, device="cpu"
        )
        if "quantization_config" in config and "_proj." in name:
            weights[name] = weight.to(torch.float8_e4m3fn)
            blocks = [(size + 127) // 128 for size in shape]
            weights[f"{name}_scale_inv"] = torch.ones(
                blocks, dtype=torch.float32, device="cpu"
            )
        else:
            weights[name] = weight.bfloat16().requires_grad_(requires_grad)
    return weights


class WriteRecorder(TorchDispatchMode):
    """Notes each op that mutates a tensor, with the grad mode it ran under."""

    def __init__(self):
        super().__init__()
        # Storages are kept, so that no address is used twice.
        self.writes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for i, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            value = args[i] if i < len(args) else kwargs.get(argument.name)
            if isinstance(value, torch.Tensor):
                self.writes.append(
                    (value.untyped_storage(), str(func), torch.is_grad_enabled())
                )
        return func(*args, **kwargs)

    def into(self, storages):
        return [
            (op, grad_mode)
            for storage, op, grad_mode in self.writes
            if storage.data_ptr() in storages
        ]


def storages(model):
    tensors = [*model.parameters(), *model.buffers()]
    return {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}


def custom_weight_loader(model, named_tensors):
    model.load_weights(named_tensors)


@unittest.skipUnless(
    torch.cuda.is_available() or importlib.util.find_spec("vllm"),
    "building RotaryEmbedding without CUDA needs vllm._custom_ops",
)
class TestWeightWritesUnderNoGrad(CustomTestCase):
    @classmethod
    def setUpClass(cls):
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed.parallel_state import (
            init_distributed_environment,
            initialize_model_parallel,
        )
        from sglang.srt.layers.dp_attention import initialize_dp_attention
        from sglang.srt.runtime_context import publish
        from sglang.srt.server_args import ServerArgs

        cls.root = Path(tempfile.mkdtemp())
        cls.paths = {}
        for i, (name, (config, _)) in enumerate(MODELS.items()):
            folder = cls.root / str(i)
            folder.mkdir()
            (folder / "config.json").write_text(json.dumps(config))
            save_file(make_weights(config), folder / "model.safetensors")
            cls.paths[name] = str(folder)
        cls.server_args = ServerArgs(model_path=cls.paths["dense"], device=DEVICE)
        publish(cls.server_args, role="test")
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
        initialize_dp_attention(
            cls.server_args, ModelConfig(cls.paths["dense"], dtype="bfloat16")
        )

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

    def setUp(self):
        super().setUp()
        # set_default_torch_dtype does not restore when its body raises
        self.addCleanup(torch.set_default_dtype, torch.get_default_dtype())
        self.enterContext(torch.enable_grad())

    @contextlib.contextmanager
    def check_writes(self, recorder, get_model, before):
        """The body must write weights, all of them with grad mode off.

        before: {storage pointer: tensor} of the model when the body starts.
        """
        self.assertTrue(torch.is_grad_enabled())
        yield
        self.assertTrue(torch.is_grad_enabled())
        model = get_model()
        writes = recorder.into({**before, **storages(model)})
        self.assertGreater(len(writes), 5)
        self.assertEqual([op for op, grad_mode in writes if grad_mode], [])
        kept = {id(tensor) for tensor in before.values()}
        for name, tensor in model.named_parameters():
            self.assertTrue(tensor.is_leaf, name)
            self.assertIsNone(tensor.grad_fn, name)
            # quantisation may replace a parameter, but not change a flag
            self.assertTrue(tensor.requires_grad or id(tensor) not in kept, name)
        for name, tensor in model.named_buffers():
            self.assertFalse(tensor.requires_grad, name)
        for module_name, module in model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    self.assertIsNone(value.grad_fn, f"{module_name}.{name}")

    def load(self, name, load_format, path=None):
        """A real cold load in which only the parameters' requires_grad is ours."""
        from sglang.srt.configs.device_config import DeviceConfig
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.model_loader import loader as loader_module

        model_config = ModelConfig(
            path or self.paths[name], dtype="bfloat16", quantization=MODELS[name][1]
        )
        load_config = LoadConfig(load_format=load_format)
        loader = loader_module.get_model_loader(load_config, model_config)
        initialize = loader_module._initialize_model
        recorder, before = WriteRecorder(), {}

        def initialize_trainable(*args, **kwargs):
            model = initialize(*args, **kwargs).requires_grad_(True)
            before.update(storages(model))
            recorder.writes.clear()  # writes of the constructors
            return model

        built = SimpleNamespace(model_config=model_config, load_config=load_config)
        with (
            mock.patch.object(loader_module, "_initialize_model", initialize_trainable),
            self.check_writes(recorder, lambda: built.model, before),
            recorder,
        ):
            built.model = loader.load_model(
                model_config=model_config, device_config=DeviceConfig(DEVICE)
            )
        return built

    def test_default_loader(self):
        for name in MODELS:
            with self.subTest(name):
                self.load(name, "auto")

    def test_default_loader_quantises_experts(self):
        # writes single elements of a scale parameter
        self.load("moe, online fp8", "auto")

    def test_dummy_loader(self):
        for name in MODELS:
            with self.subTest(name):
                self.load(name, "dummy")

    def test_dummy_loader_quantises_experts(self):
        self.load("moe, online fp8", "dummy")

    def test_initialize_dummy_weights(self):
        from sglang.srt.model_loader.weight_utils import initialize_dummy_weights

        model = torch.nn.Linear(4, 8, device=DEVICE)
        weight = model.weight
        with WriteRecorder() as recorder:
            initialize_dummy_weights(model)
        writes = recorder.into(storages(model))
        self.assertEqual({grad_mode for _, grad_mode in writes}, {False})
        self.assertIs(model.weight, weight)
        self.assertTrue(weight.requires_grad and weight.is_leaf)

    def test_flash_rl_loader(self):
        self.load("dense", "flash_rl")

    def test_pt_loader(self):
        folder = self.root / "pt"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(DENSE))
        torch.save(make_weights(DENSE), folder / "model.pt")
        self.load("dense", "pt", str(folder))

    def test_sharded_state_loader(self):
        from sglang.srt.model_loader.loader import ShardedStateLoader

        folder = self.root / "sharded"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(MOE))
        ShardedStateLoader.save_model(self.load("moe", "auto").model, str(folder))
        self.load("moe", "sharded_state", str(folder))

    def updater(self, name):
        from sglang.srt.model_executor.model_runner import ModelRunner
        from sglang.srt.model_executor.model_runner_components.weight_updater import (
            WeightUpdater,
        )

        runner = self.load(name, "auto")
        runner.server_args = self.server_args
        return WeightUpdater(
            tp_rank=0,
            device=DEVICE,
            gpu_id=0,
            model_config=runner.model_config,
            custom_weight_loaders={f"{__name__}.custom_weight_loader": None},
            get_model=lambda: runner.model,
            update_model_fields=functools.partial(
                ModelRunner.update_model_fields, runner
            ),
            recapture_cuda_graph=lambda: None,
            get_model_runner=lambda: runner,
            _model_update_group={"group": torch.distributed.group.WORLD},
        )

    def check_update(self, updater, method, *args, **kwargs):
        model = updater.get_model().requires_grad_(True)
        before, recorder = storages(model), WriteRecorder()
        with self.check_writes(recorder, lambda: model, before), recorder:
            result = getattr(updater, method)(*args, **kwargs)
        self.assertTrue(result[0], result)

    def test_update_from_tensor(self):
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

        for name in ("dense", "moe"):
            updater = self.updater(name)
            model = updater.get_model()
            weights = {
                key: weight.to(DEVICE)
                for key, weight in make_weights(MODELS[name][0], True).items()
            }
            own_names = {
                key: torch.zeros_like(value, requires_grad=True)
                for key, value in model.named_parameters()
            }
            bucket = FlattenedTensorBucket(named_tensors=list(weights.items()))
            flattened = {
                "flattened_tensor": bucket.get_flattened_tensor(),
                "metadata": bucket.get_metadata(),
            }
            for load_format, payload in {
                None: list(weights.items()),
                "direct": list(own_names.items()),
                f"{__name__}.custom_weight_loader": list(weights.items()),
                "flattened_bucket": flattened,
            }.items():
                with self.subTest(name, load_format=load_format):
                    self.check_update(
                        updater,
                        "update_weights_from_tensor",
                        payload,
                        load_format=load_format,
                    )

    def test_update_from_distributed(self):
        weights = make_weights(MOE)
        for load_format in (None, "flattened_bucket"):
            updater = self.updater("moe")
            with self.subTest(load_format=load_format):
                self.check_update(
                    updater,
                    "update_weights_from_distributed",
                    list(weights),
                    [weight.dtype for weight in weights.values()],
                    [list(weight.shape) for weight in weights.values()],
                    "group",
                    load_format=load_format,
                )

    def test_update_from_disk(self):
        for name in ("dense", "moe", "dense, block fp8", "moe, block fp8"):
            with self.subTest(name):
                updater = self.updater(name)
                self.check_update(
                    updater,
                    "update_weights_from_disk",
                    self.paths[name],
                    "auto",
                )

    def test_loader_threads(self):
        """The grad mode is thread-local: models that load in threads need it too."""
        from sglang.srt.model_loader.utils import maybe_executor_submit

        weight = torch.nn.Parameter(torch.zeros(2, device=DEVICE))
        futures = []
        with torch.no_grad(), concurrent.futures.ThreadPoolExecutor(1) as executor:
            maybe_executor_submit(
                executor=executor,
                futures=futures,
                use_async=True,
                func=weight.fill_,
                func_args=(1.0,),
            )
        futures[0].result()
        self.assertEqual(weight.tolist(), [1.0, 1.0])

    def test_lora_buffer(self):
        """A buffer must not keep the graph of an adapter that requires grad."""
        from sglang.srt.lora.utils import copy_weight_into_buffer

        for dtype in (torch.bfloat16, torch.float32):
            buffer = torch.zeros(2, 4, 8, dtype=torch.bfloat16, device=DEVICE)
            adapter = torch.ones(4, 8, dtype=dtype, device=DEVICE, requires_grad=True)
            copy_weight_into_buffer(buffer[1], adapter)
            self.assertEqual(buffer[1].sum().item(), 32.0)
            self.assertIsNone(buffer.grad_fn)
            self.assertFalse(buffer.requires_grad)


if __name__ == "__main__":
    unittest.main()
