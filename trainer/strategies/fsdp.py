"""Fully sharded data parallelism (FSDP2): each process keeps a shard of every parameter."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from regimen.conf.schema_trainer import TensorParallelConfig
from regimen.data.batch import map_tensors
from regimen.trainer.errors import ModelError
from regimen.trainer.strategies.ddp import Processes, Replicas
from regimen.trainer.strategies.strategy import NULL_CONTEXT, PLAN, Mesh, instances, tensor_styles

_FORMATS = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}


class FSDP(Replicas):
    """Train with torch's `fully_shard`.

    Each process keeps a shard of every parameter, of its gradient and of its optimizer state.
    `wrap_modules` names classes whose instances are gathered one at a time. Without it the whole
    model is gathered at once, which saves optimizer memory but no parameter memory.
    `shard_size`: of a group that holds all shards once; its groups are replicas (HSDP).
    `tensor_parallel` splits single layers, over neighbours that compute on the same samples.
    """

    name = "fsdp"
    evaluates_in_step = True

    def __init__(
        self,
        processes: Processes | None = None,
        *,
        wrap_modules: Sequence[str] | None = None,
        mixed_precision: str | None = None,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        sharded_checkpoint: bool = False,
        shard_size: int | None = None,
        tensor_parallel: TensorParallelConfig | None = None,
    ) -> None:
        super().__init__(processes)
        self._tensor = tensor_parallel or TensorParallelConfig()
        self.mesh = Mesh.of(self.group.world_size, shard_size, self._tensor.size)
        self.group.tensor_size = self.mesh.tensor
        self._unchecked = self.mesh.tensor > 1
        self.gradient_scale = float(self.group.data_size)
        self._wrap_modules = wrap_modules or []
        self.sharded_checkpoint = sharded_checkpoint
        self.updates_on_host = cpu_offload and self.device.type != "cpu"
        self._options: dict[str, Any] = {
            "reshard_after_forward": reshard_after_forward,
            # Gradients are reduced in full precision, whichever dtype the model computes in.
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=_FORMATS[mixed_precision],
                reduce_dtype=torch.float32 if mixed_precision else None,
            ),
        }
        if self.updates_on_host:  # the gradient norm is then reduced between hosts
            self._options["offload_policy"] = CPUOffloadPolicy()
            self.group.backend = f"cpu:gloo,{self.device.type}:{self.group.backend}"

    def setup(self) -> None:
        """Select the device, join the process group, and lay the processes out."""
        super().setup()
        kind, sizes = self.device.type, self.mesh.sizes()
        if len(sizes) == 1:
            self._meshes = init_device_mesh(kind, (*sizes.values(),), mesh_dim_names=(*sizes,))
        else:
            grid = torch.arange(self.group.world_size).view(*sizes.values())
            groups = self.group.along([*sizes.values()])
            # It advises on the order of collectives, which is torch's own.
            logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
            self._meshes = DeviceMesh.from_group(groups, kind, grid, mesh_dim_names=(*sizes,))

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the parameters, before an optimizer is built over them."""
        # Only contiguous parameters can be sharded: channels_last applies to the images alone.
        model = super().prepare(model).to(memory_format=torch.contiguous_format)
        if self.mesh.tensor > 1:
            styles = tensor_styles(model, self._tensor.plan, self.mesh.tensor)
            plan = {name: _style(how, model.get_submodule(name)) for name, how in styles.items()}
            # Every process has the whole tensors, so nothing has to be sent.
            parallelize_module(model, self._meshes["tensor"], plan, src_data_rank=None)
        mesh = self._meshes[tuple(name for name in self.mesh.sizes() if name != "tensor")]
        # It requires inner modules first; the model itself may be one of them.
        units = reversed(instances(model, self._wrap_modules, "strategy.wrap_modules"))
        for module in dict.fromkeys([*units, model]):
            fully_shard(module, mesh=mesh, **self._options)
        return model

    def check(self, others: Mapping[str, nn.Module]) -> None:
        """Raise ModelError for trained parameters that are not sharded.

        torch's optimizers cannot step sharded and unsharded parameters together.
        """
        every = (pair for n, m in others.items() for pair in m.named_parameters(prefix=n))
        if trained := [name for name, parameter in every if parameter.requires_grad]:
            message = f"fsdp shards the model only, but the task trains {trained[0]}"
            raise ModelError("strategy", message, "use strategy=ddp, or move it into the model")

    def _exchanging(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        module: Any = getattr(wrapped, "_orig_mod", wrapped)  # unwrap the result of torch.compile
        module.set_requires_gradient_sync(last)
        return self._comparing(module) if last and self._unchecked else NULL_CONTEXT

    @contextmanager
    def _comparing(self, model: nn.Module) -> Iterator[None]:
        """Refuse a plan that leaves a whole parameter with the gradient of one process's part.

        Whole parameters have the same gradient on the processes of a tensor group, but for those
        that are used between a column-wise and a row-wise layer.
        """
        yield
        self._unchecked = False
        grads: dict[str, Any] = {n: p.grad for n, p in model.named_parameters()}
        grads = {n: g for n, g in grads.items() if g is not None and "tensor" not in _dimensions(g)}
        own = [grad.to_local().norm().float() for grad in grads.values()]
        own = torch.stack(own).tolist() if own else own  # one wait for the device
        every, size = self.group.gather(own), self.mesh.tensor
        for start in range(0, len(every), size):
            for name, *norms in zip(grads, *every[start : start + size], strict=True):
                if max(norms) - min(norms) > 0.05 * max(norms):
                    message = f"{name} is whole, and used on a part of the features that it gets"
                    hint = "leave the split layers around it out: its gradient would be of one part"
                    raise ModelError(PLAN, message, hint)

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Evaluate what is saved; an average may have been copied into the weights."""
        _forget_gathered(model)
        try:
            with super().evaluating(model):
                yield
        finally:
            _forget_gathered(model)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load this process's shards of a whole state."""
        model.load_state_dict(self.split_like(state, model.state_dict()))
        _forget_gathered(model)

    def gather_tensors(self, tree: Any, only_main: bool = False) -> Any:
        """Return `tree` with unsharded tensors on the host; a collective over the same trees.

        `only_main`: the other processes get tensors without values (on the meta device). Else the
        memory of a machine would hold the state once for each of its processes.
        """

        def gathered(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            whole = tensor.full_tensor()
            if only_main and not self.group.is_main:
                return torch.empty(whole.shape, dtype=whole.dtype, device="meta")
            return whole.cpu()

        return map_tensors(gathered, tree)

    def split_like(self, tree: Any, parameters: Mapping[str, Tensor]) -> Any:
        """Return `tree` with this process's shards of the tensors under a parameter's name."""
        if not isinstance(tree, Mapping):
            return tree
        return {
            key: map_tensors(partial(_part, like=parameters[key]), value)
            if key in parameters
            else self.split_like(value, parameters)
            for key, value in tree.items()
        }


def _style(name: str, module: nn.Module) -> ParallelStyle:
    whole = Replicate() if name.endswith("_rep") else None
    if name.startswith("colwise"):
        return ColwiseParallel(output_layouts=whole)
    numbers = isinstance(module, nn.Embedding)  # its input has no columns to be split
    return RowwiseParallel(input_layouts=Replicate() if numbers else whole)


def _dimensions(tensor: Any) -> Sequence[str]:
    return tensor.device_mesh.mesh_dim_names or ()


def _forget_gathered(model: nn.Module) -> None:
    """Make the next forward pass gather the parameters again, after a write to their shards."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _part(value: Any, like: Any) -> Any:
    whole = isinstance(value, Tensor) and not isinstance(value, DTensor)  # else already a shard
    if not whole or not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    value = value.to(like.device, copy=True)
    # Every process has the whole tensor, so nothing has to be sent.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
