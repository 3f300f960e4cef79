// torch's CUDA kernels, done by its CPU kernels on the same memory (runtime.cpp: device memory is
// host memory). Loaded at the end of `import torch`.
//
// Whatever has a CPU kernel is replaced, unless it only makes views or memory. Copies between host
// and device stay those of torch, so that their order, pinning and synchronisation are its own.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/copy_native.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/CPUAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/library.h>

#include <map>
#include <set>
#include <string>

using at::IValue;
using at::Tensor;

extern "C" void fake_cuda_before_kernel(void* stream);  // in runtime.cpp

static void before_kernel() {
  fake_cuda_before_kernel(c10::cuda::getCurrentCUDAStream().stream());
}

// A CPU tensor of the same memory.
static Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  void* start = const_cast<void*>(tensor.storage().data());
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(),
                       at::DataPtr(start, c10::Device(c10::kCPU)), c10::GetCPUAllocator(), true);
  Tensor made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    made.unsafeGetTensorImpl()->set_wrapped_number(true);
  return made;
}

static Tensor on_device(const Tensor& tensor, c10::Device device) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  Tensor made = at::empty_strided(tensor.sizes(), tensor.strides(),
                                  tensor.options().device(device).pinned_memory(false));
  on_host(made).copy_(tensor);
  return made;
}

static void redirect(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  static const std::set<std::string> waiting = {"aten::nonzero", "aten::masked_select",
                                                "aten::equal", "aten::_unique2",
                                                "aten::unique_dim", "aten::unique_consecutive"};
  before_kernel();
  if (waiting.count(op.schema().name()) &&
      c10::cuda::warning_state().get_sync_debug_mode() != c10::cuda::SyncDebugMode::L_DISABLED)
    c10::cuda::warn_or_error_on_sync();
  const auto& schema = op.schema();
  size_t count = schema.arguments().size(), begin = stack->size() - count;
  std::vector<IValue> given(stack->begin() + begin, stack->end());
  std::map<c10::TensorImpl*, Tensor> hosts;
  c10::Device device(c10::kCUDA, c10::cuda::current_device());
  auto host = [&](const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    device = tensor.device();
    auto found = hosts.find(tensor.unsafeGetTensorImpl());
    if (found == hosts.end())
      found = hosts.emplace(tensor.unsafeGetTensorImpl(), on_host(tensor)).first;
    return found->second;
  };
  for (size_t i = 0; i < count; ++i) {
    IValue& value = (*stack)[begin + i];
    if (value.isTensor()) {
      value = host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& tensor : value.toTensorVector()) made.push_back(host(tensor));
      value = made;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> made;
      for (const auto& tensor : value.toOptionalTensorVector())
        made.push_back(tensor ? std::optional<Tensor>(host(*tensor)) : std::nullopt);
      value = made;
    } else if (value.isDevice()) {
      device = value.toDevice();
      value = c10::Device(c10::kCPU);
    } else if (value.isGenerator()) {
      value = IValue();
    }
  }
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  // An output that was given may have got another shape.
  for (const IValue& value : given) {
    if (!value.isTensor() || !value.toTensor().defined() || !value.toTensor().is_cuda()) continue;
    const Tensor& tensor = value.toTensor();
    const Tensor& made = hosts.at(tensor.unsafeGetTensorImpl());
    if (made.sizes() == tensor.sizes() && made.storage().data() == tensor.storage().data())
      continue;
    tensor.resize_(made.sizes());
    on_host(tensor).copy_(made);
  }
  size_t results = schema.returns().size(), first = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    IValue& value = (*stack)[first + i];
    const auto* alias = schema.returns()[i].alias_info();
    if (alias && alias->isWrite()) {
      for (size_t j = 0; j < count; ++j) {
        const auto* other = schema.arguments()[j].alias_info();
        if (other && other->beforeSets() == alias->beforeSets()) value = given[j];
      }
    } else if (value.isTensor()) {
      value = on_device(value.toTensor(), device);
    } else if (value.isTensorList()) {
      c10::List<Tensor> made;
      for (const Tensor& tensor : value.toTensorVector()) made.push_back(on_device(tensor, device));
      value = made;
    }
  }
}

static Tensor& copy(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!self.is_cuda() || !source.is_cuda())
    return at::native::copy_(self, source, non_blocking);
  before_kernel();
  on_host(self).copy_(on_host(source).expand(self.sizes()));
  return self;
}

static void foreach_copy(at::TensorList selves, at::TensorList sources, bool non_blocking) {
  for (size_t i = 0; i < selves.size(); ++i) {
    Tensor self = selves[i];
    copy(self, sources[i], non_blocking);
  }
}

static bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& result : schema.returns())
    if (result.alias_info() && !result.alias_info()->isWrite()) return true;
  return false;
}

static const std::set<std::string> own = {
    "aten::empty", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::record_stream",
    "aten::is_pinned", "aten::_pin_memory", "aten::_local_scalar_dense", "aten::is_set_to",
    "aten::copy_", "aten::_foreach_copy_", "aten::_copy_from", "aten::_copy_from_and_resize",
    "aten::_fused_sdp_choice", "aten::resize_as_", "aten::_to_copy", "aten::_resize_output_"};

struct Silent : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

static torch::Library* replace() {
  Silent silent;
  c10::WarningUtils::WarningHandlerGuard guard(&silent);  // of each kernel that is replaced
  auto* library = new torch::Library(torch::Library::IMPL, "aten", c10::DispatchKey::CUDA, __FILE__,
                                     __LINE__);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (name.name.rfind("aten::", 0) || own.count(name.name)) continue;
    auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(c10::DispatchKey::CUDA) || is_view(op->schema()) ||
        !op->hasComputedKernelForDispatchKey(c10::DispatchKey::CPU))
      continue;
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&redirect>());
  }
  library->impl("copy_", TORCH_FN(copy));
  library->impl("_foreach_copy_", TORCH_FN(foreach_copy));
  return library;
}

static torch::Library* replaced = replace();

TORCH_LIBRARY(fake_cuda, library) {
  library.def("on_host(Tensor tensor) -> Tensor", [](const Tensor& tensor) {
    before_kernel();
    return on_host(tensor);
  });
}
