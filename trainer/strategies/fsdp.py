"""Fully sharded data parallelism (FSDP2): each process keeps a shard of every parameter.

torch's DTensor imports sympy, which takes 3 s: functions import it, so that the launcher and a dry
run, which only ask the class, do without it.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from regimen.conf.check import check
from regimen.conf.errors import raise_problems
from regimen.conf.schema_trainer import TensorParallelConfig
from regimen.data.batch import map_tensors
from regimen.trainer.errors import ModelError, unwrapped
from regimen.trainer.strategies.multi_process import MultiProcess
from regimen.trainer.strategies.strategy import (
    NULL_CONTEXT,
    Devices,
    Mesh,
    instances,
    sparse_layers,
)
from regimen.trainer.strategies.tensor_parallel import PLAN, tensor_styles

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, None: None}


class FSDP(MultiProcess):
    """Train with torch's `fully_shard`.

    Each process keeps a shard of every parameter, of its gradient and of its optimizer state.
    `wrap_modules` names classes whose instances are gathered one at a time. Without it the whole
    model is gathered at once, which saves optimizer memory but no parameter memory.
    `shard_size`: of a group that holds all shards once; its groups are replicas (HSDP).
    `tensor_parallel`, a `size` and a `plan`, splits single layers, over neighbours that compute on
    the same samples.
    """

    name = "fsdp"
    shards_parameters = True
    evaluates_in_step = True

    def __init__(
        self,
        *,
        accelerator: str = "auto",
        devices: Devices = "auto",
        backend: str = "auto",
        timeout: float = 1800.0,
        max_restarts: int = 0,
        sync_batchnorm: bool = False,
        wrap_modules: Sequence[str] | None = None,
        mixed_precision: str | None = None,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        sharded_checkpoint: bool = False,
        shard_size: int | None = None,
        tensor_parallel: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(
            accelerator=accelerator,
            devices=devices,
            backend=backend,
            timeout=timeout,
            max_restarts=max_restarts,
            sync_batchnorm=sync_batchnorm,
        )
        self._plan = _tensor_options(tensor_parallel).plan
        self.mesh = self.mesh_of(
            self.group.world_size, shard_size=shard_size, tensor_parallel=tensor_parallel
        )
        self.group.tensor_size = self.mesh.tensor
        self._checks_gradients = self.mesh.tensor > 1  # of the first update
        self.gradient_scale = float(self.group.data_size)
        self._wrap_modules = wrap_modules or []
        self._param_dtype = _DTYPES[mixed_precision]
        self._reshard_after_forward = reshard_after_forward
        self.sharded_checkpoint = sharded_checkpoint
        self.updates_on_host = cpu_offload and self.device.type != "cpu"
        if self.updates_on_host:  # the gradient norm is then reduced between hosts
            self.group.backend = f"cpu:gloo,{self.device.type}:{self.group.backend}"

    @classmethod
    def mesh_of(
        cls,
        processes: int,
        *,
        shard_size: int | None = None,
        tensor_parallel: Mapping[str, Any] | None = None,
        **others: Any,
    ) -> Mesh:
        """Return the grid of a run's processes. Raises ModelError if they do not make one."""
        return Mesh.of(processes, shard_size, _tensor_options(tensor_parallel).size)

    @classmethod
    def check_model(
        cls, model: nn.Module, *, tensor_parallel: Mapping[str, Any] | None = None, **others: Any
    ) -> None:
        """Raise ModelError for sparse gradients, and for a plan that does not fit the model."""
        for layer, name in sparse_layers(model).items():
            if layer.requires_grad:
                raise ModelError(
                    "strategy",
                    f"fsdp shards gradients, which it cannot do with the sparse one of {name}",
                    "build the embedding with sparse=False, or use strategy=ddp",
                )
        if tensor_parallel is not None:
            options = _tensor_options(tensor_parallel)
            tensor_styles(model, options.plan, options.size)

    def setup(self) -> None:
        """Select the device, join the process group, and lay the processes out."""
        from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

        super().setup()
        kind = self.device.type
        sizes = self.mesh.sizes()
        names = tuple(sizes)
        shape = tuple(sizes.values())
        if len(sizes) == 1:
            self._meshes = init_device_mesh(kind, shape, mesh_dim_names=names)
        else:
            grid = torch.arange(self.group.world_size).view(*shape)
            groups = self.group.along(shape)
            # It advises on the order of collectives, which is torch's own.
            logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
            self._meshes = DeviceMesh.from_group(groups, kind, grid, mesh_dim_names=names)

    def prepare(self, model: nn.Module) -> nn.Module:
        """Shard the parameters, before an optimizer is built over them."""
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
        from torch.distributed.tensor.parallel import parallelize_module

        # Only contiguous parameters can be sharded: channels_last applies to the images alone.
        model = super().prepare(model).to(memory_format=torch.contiguous_format)
        if self.mesh.tensor > 1:
            styles = tensor_styles(model, self._plan, self.mesh.tensor)
            plan = {name: _style(how, model.get_submodule(name)) for name, how in styles.items()}
            # Every process has the whole tensors, so nothing has to be sent.
            parallelize_module(model, self._meshes["tensor"], plan, src_data_rank=None)

        options: dict[str, Any] = {
            "mesh": self._meshes[tuple(name for name in self.mesh.sizes() if name != "tensor")],
            "reshard_after_forward": self._reshard_after_forward,
            # Gradients are reduced in full precision, whichever dtype the model computes in.
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self._param_dtype,
                reduce_dtype=None if self._param_dtype is None else torch.float32,
            ),
        }
        if self.updates_on_host:
            options["offload_policy"] = CPUOffloadPolicy()
        # `fully_shard` requires inner modules first; the model itself may be one of them.
        units = reversed(instances(model, self._wrap_modules, "strategy.wrap_modules"))
        for module in dict.fromkeys([*units, model]):
            fully_shard(module, **options)
        return model

    def wrap(self, model: nn.Module) -> nn.Module:
        """Return the model, which `prepare` has sharded. Raises ModelError for sparse gradients."""
        self.check_model(unwrapped(model))
        return model

    def check(self, others: Mapping[str, nn.Module]) -> None:
        """Raise ModelError for trained parameters that are not sharded.

        torch's optimizers cannot step sharded and unsharded parameters together.
        """
        for prefix, module in others.items():
            for name, parameter in module.named_parameters(prefix=prefix):
                if parameter.requires_grad:
                    raise ModelError(
                        "strategy",
                        f"fsdp shards the model only, but the task trains {name}",
                        "use strategy=ddp, or move it into the model",
                    )

    def _exchanging(self, wrapped: nn.Module, last: bool) -> AbstractContextManager[Any]:
        module = unwrapped(wrapped)  # of torch.compile
        module.set_requires_gradient_sync(last)
        if last and self._checks_gradients:
            return self._checking_gradients(module)
        return NULL_CONTEXT

    @contextmanager
    def _checking_gradients(self, model: nn.Module) -> Iterator[None]:
        """Refuse a plan that leaves a whole parameter with the gradient of one process's part.

        Whole parameters have the same gradient on the processes of a tensor group, but for those
        that are used between a column-wise and a row-wise layer.
        """
        yield
        self._checks_gradients = False
        norms = dict[str, Tensor]()
        for name, parameter in model.named_parameters():
            gradient: Any = parameter.grad
            if gradient is not None and "tensor" not in _dimensions(gradient):
                norms[name] = gradient.to_local().norm().float()
        # One wait for the device and one exchange, after the first update only.
        own = torch.stack([*norms.values()]).tolist() if norms else []
        by_rank = self.group.gather(own)
        size = self.mesh.tensor
        for start in range(0, len(by_rank), size):
            for name, *values in zip(norms, *by_rank[start : start + size], strict=True):
                if max(values) - min(values) > 0.05 * max(values):
                    raise ModelError(
                        PLAN,
                        f"{name} is whole, and used on a part of the features that it gets",
                        "leave the split layers around it out: its gradient would be of one part",
                    )

    @contextmanager
    def evaluating(self, model: nn.Module) -> Iterator[None]:
        """Evaluate what is saved; an average may have been copied into the weights."""
        _free_gathered(model)
        try:
            with super().evaluating(model):
                yield
        finally:
            _free_gathered(model)

    @contextmanager
    def unsharded(self, model: nn.Module) -> Iterator[None]:
        """Keep the parameters that the first forward pass, of all processes, gathers.

        From then on any part of the model may be called, any number of times, by any process.
        """
        units = _units(model)
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
        try:
            yield
        finally:
            for unit in units:
                unit.set_reshard_after_forward(self._reshard_after_forward, recurse=False)
            _free_gathered(model)

    def load_model_state(self, model: nn.Module, state: Mapping[str, Any]) -> None:
        """Load this process's shards of a whole state."""
        model.load_state_dict(self.split_like(state, model.state_dict()))
        _free_gathered(model)

    def gather_tensors(self, tree: Any) -> Any:
        """Return `tree` with unsharded tensors on the host; a collective over the same trees.

        Other processes than the main one get tensors without values (on the meta device). Else the
        memory of a machine would hold the state once for each of its processes.
        """
        from torch.distributed.tensor import DTensor

        def gathered(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, DTensor):
                return tensor
            # A collective, and then a wait for the device: once per tensor of a checkpoint.
            whole = tensor.full_tensor()
            if not self.group.is_main:
                return torch.empty(whole.shape, dtype=whole.dtype, device="meta")
            return whole.cpu()

        return map_tensors(gathered, tree)

    def split_like(self, tree: Any, parameters: Mapping[str, Tensor]) -> Any:
        """Return `tree` with this process's shards of the tensors under a parameter's name."""
        if not isinstance(tree, Mapping):
            return tree
        split = {}
        for key, value in tree.items():
            if key in parameters:
                split[key] = map_tensors(partial(_shard, like=parameters[key]), value)
            else:
                split[key] = self.split_like(value, parameters)
        return split


def _tensor_options(given: Mapping[str, Any] | None) -> TensorParallelConfig:
    """Return the values of `tensor_parallel`, which nobody has looked at for a user's class.

    Raises ModelError.
    """
    key = "strategy.tensor_parallel"
    values = {} if given is None else given
    if not isinstance(values, Mapping):
        raise ModelError(key, f"expected size and plan, got {values!r}")
    found = check(dict(values), TensorParallelConfig)
    raise_problems((replace(one, key=f"{key}.{one.key}") for one in found), ModelError)
    return TensorParallelConfig(**values)


def _style(name: str, module: nn.Module) -> Any:
    """Return torch's ParallelStyle of a name in a plan."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    replicated = Replicate() if name.endswith("_rep") else None
    if name.startswith("colwise"):
        return ColwiseParallel(output_layouts=replicated)
    if isinstance(module, nn.Embedding):  # its input has no columns to be split
        return RowwiseParallel(input_layouts=Replicate())
    return RowwiseParallel(input_layouts=replicated)


def _dimensions(tensor: Any) -> Sequence[str]:
    return tensor.device_mesh.mesh_dim_names or ()


def _free_gathered(model: nn.Module) -> None:
    """Make the next forward pass gather the parameters again, after a write to their shards."""
    for unit in _units(model):
        unit.reshard()


def _units(model: nn.Module) -> list[Any]:
    """Return the modules whose parameters are gathered together."""
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _shard(value: Any, like: Any) -> Any:
    """Return this process's shard of a whole tensor; anything else as it is."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(value, Tensor) or isinstance(value, DTensor):
        return value
    if not isinstance(like, DTensor) or value.shape != like.shape:
        return value
    value = value.to(like.device, copy=True)
    # Every process has the whole tensor, so nothing has to be sent.
    return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
