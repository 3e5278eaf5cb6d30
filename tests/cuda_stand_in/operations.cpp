// Operations on tensors of the stand-in. A boxed fallback runs each on views of the same memory as CPU tensors.
#include "stand_in.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <unordered_map>
#include <vector>

namespace stand_in {
namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::SymIntArrayRef;
template <class T>
using Maybe = std::optional<T>;
using Dtype = Maybe<at::ScalarType>;
using Place = Maybe<c10::Device>;

// Their CUDA kernels read a size or a flag on the host.
const std::set<std::string> kWaiting{
    "aten::nonzero",    "aten::masked_select",     "aten::_unique2",          "aten::unique_dim",
    "aten::bincount",   "aten::unique_consecutive", "aten::equal",             "aten::is_nonzero",
};

void delete_storage(void* storage) { delete static_cast<c10::Storage*>(storage); }

// Memory of `storage` that keeps it alive, on another device.
c10::DataPtr shared_memory(const c10::Storage& storage, c10::Device device) {
  return {const_cast<void*>(storage.data()), new c10::Storage(storage), &delete_storage, device};
}

c10::Storage share_storage(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator) {
  return c10::Storage(c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), shared_memory(storage, device), allocator, true));
}

Tensor make_like(const Tensor& tensor, const c10::Storage& storage, DispatchKey key) {
  Tensor made = at::detail::make_tensor<at::TensorImpl>(c10::Storage(storage), DispatchKeySet(key), tensor.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

// The tensors of one call: those on the device, and the CPU's views of their memory.
class Views {
 public:
  Tensor to_host(const Tensor& tensor) {
    if (!tensor.defined() || !tensor.is_cuda()) return tensor;
    for (auto& [device, host] : pairs_) {
      if (device.is_same(tensor)) return host;
    }
    c10::Storage storage = tensor.storage();
    auto* key = storage.unsafeGetStorageImpl();
    if (!host_storages_.count(key)) {
      c10::Storage shared = share_storage(storage, at::kCPU, c10::GetAllocator(at::kCPU));
      host_storages_.emplace(key, shared);
      device_storages_.emplace(shared.unsafeGetStorageImpl(), storage);
    }
    Tensor host = make_like(tensor, host_storages_.at(key), DispatchKey::CPU);
    if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) host.unsafeGetTensorImpl()->set_wrapped_number(true);
    pairs_.emplace_back(tensor, host);
    return host;
  }

  Tensor to_device(const Tensor& tensor) {
    if (!tensor.defined() || tensor.is_cuda()) return tensor;
    for (auto& [device, host] : pairs_) {
      if (host.is_same(tensor)) return device;
    }
    auto* key = tensor.storage().unsafeGetStorageImpl();
    if (!device_storages_.count(key)) {
      c10::Device device(c10::DeviceType::CUDA, current_device());
      device_storages_.emplace(key, share_storage(tensor.storage(), device, device_allocator()));
    }
    return make_like(tensor, device_storages_.at(key), DispatchKey::CUDA);
  }

  // Give the tensors of the device the sizes and the memory that an operation has given to their views.
  void write_back() {
    for (auto& [device, host] : pairs_) {
      if (device.sizes() == host.sizes() && device.strides() == host.strides() && device.data_ptr() == host.data_ptr())
        continue;
      auto* storage = device.storage().unsafeGetStorageImpl();
      if (storage->data() != host.storage().data()) {
        storage->set_data_ptr_noswap(shared_memory(host.storage(), device.device()));
        storage->set_nbytes(host.storage().nbytes());
      }
      device.unsafeGetTensorImpl()->set_sizes_and_strides(host.sizes(), host.strides(), host.storage_offset());
    }
  }

 private:
  std::unordered_map<c10::StorageImpl*, c10::Storage> host_storages_, device_storages_;
  std::vector<std::pair<Tensor, Tensor>> pairs_;
};

// The devices of the arguments of a call. A scalar of the CPU may be used with tensors of any device.
struct Devices {
  bool host = false, device = false;
  void add(const Tensor& tensor) {
    if (!tensor.defined()) return;
    device |= tensor.is_cuda();
    host |= tensor.is_cpu() && tensor.dim() > 0;
  }
};

c10::IValue indices_to_host(const c10::IValue& value, Views& views) {
  c10::List<Maybe<Tensor>> on_host;
  for (const Maybe<Tensor>& index : value.toOptionalTensorList().vec()) {
    if (!index.has_value() || !index->defined()) {
      on_host.push_back(index);
      continue;
    }
    on_host.push_back(Maybe<Tensor>(views.to_host(*index)));
  }
  return on_host;
}

c10::IValue argument_to_host(const c10::IValue& value, Views& views, Devices& devices) {
  if (value.isTensor()) {
    devices.add(value.toTensor());
    return views.to_host(value.toTensor());
  }
  if (value.isTensorList()) {
    c10::List<Tensor> on_host;
    for (const Tensor& each : value.toTensorVector()) {
      devices.add(each);
      on_host.push_back(views.to_host(each));
    }
    return on_host;
  }
  if (value.isOptionalTensorList()) return indices_to_host(value, views);
  if (value.isDevice()) return c10::Device(at::kCPU);
  return value;
}

c10::IValue result_to_device(const c10::IValue& value, Views& views) {
  if (value.isTensor()) return views.to_device(value.toTensor());
  if (!value.isTensorList()) return value;
  c10::List<Tensor> on_device;
  for (const Tensor& each : value.toTensorVector()) on_device.push_back(views.to_device(each));
  return on_device;
}

// Whether an assignment to indices reads the number of True in a mask. A mask and a scalar of the CPU are a masked_fill
// (canDispatchToMaskedFill in native/TensorAdvancedIndexing.cpp). Reading by a mask calls nonzero before it gets here.
bool counts_mask(const std::string& name, const c10::IValue* arguments) {
  if (name.rfind("aten::index_put", 0) && name.rfind("aten::_index_put", 0)) return false;
  const Tensor& values = arguments[2].toTensor();
  if (values.is_cpu() && values.numel() == 1) return false;
  for (const Maybe<Tensor>& index : arguments[1].toOptionalTensorList().vec()) {
    if (index.has_value() && index->defined() && index->scalar_type() == at::kBool) return true;
  }
  return false;
}

bool host_waits(const std::string& name, const c10::IValue* arguments, const c10::IValue& last) {
  // With output_size, repeat_interleave.Tensor does not read the sum of the repeats (native/cuda/Repeat.cu).
  if (name == "aten::repeat_interleave") return last.isNone();
  return kWaiting.count(name) || counts_mask(name, arguments);
}

void run_on_host(const c10::OperatorHandle& operation, torch::jit::Stack* stack) {
  const auto& schema = operation.schema();
  const c10::IValue* arguments = stack->data() + stack->size() - schema.arguments().size();
  if (host_waits(schema.name(), arguments, stack->back())) report_wait(schema.name().c_str());
  Views views;
  Devices devices;
  for (size_t i = stack->size() - schema.arguments().size(); i < stack->size(); i++)
    (*stack)[i] = argument_to_host((*stack)[i], views, devices);
  TORCH_CHECK(!(devices.host && devices.device),
              "Expected all tensors to be on the same device, but ", schema.name(), " got tensors on cuda and cpu");
  {
    c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
    operation.callBoxed(stack);
  }
  views.write_back();
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++)
    (*stack)[i] = result_to_device((*stack)[i], views);
}

Tensor empty(SymIntArrayRef sizes, Dtype dtype, Maybe<at::Layout>, Place, Maybe<bool>, Maybe<at::MemoryFormat> format) {
  return at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(sizes), device_allocator(),
                                   DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(SymIntArrayRef sizes, SymIntArrayRef strides, Dtype dtype, Maybe<at::Layout>, Place, Maybe<bool>) {
  return at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                                           device_allocator(), DispatchKeySet(DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

// Whether the host waits in a copy: aten/src/ATen/native/cuda/Copy.cu synchronizes the stream unless non_blocking, and
// cudaMemcpyAsync to memory that is not pinned returns when the copy is complete.
bool copy_waits(const Tensor& to, const Tensor& from, bool non_blocking) {
  if (to.is_cuda() == from.is_cuda() || !from.numel()) return false;
  return !non_blocking || (from.is_cuda() && !is_pinned(to.data_ptr()));
}

Tensor& copy_(Tensor& to, const Tensor& from, bool non_blocking) {
  if (copy_waits(to, from, non_blocking)) report_wait(to.is_cuda() ? "copy to the device" : "copy to the host");
  Views views;
  Tensor host_to = views.to_host(to);
  Tensor host_from = views.to_host(from);
  c10::impl::ExcludeDispatchKeyGuard below_autograd(c10::autograd_dispatch_keyset);
  host_to.copy_(host_from);
  return to;
}

at::Scalar local_scalar_dense(const Tensor& tensor) {
  report_wait("item");
  Views views;
  return at::_local_scalar_dense(views.to_host(tensor));
}

const Tensor& resize_(const Tensor& tensor, SymIntArrayRef sizes, Maybe<at::MemoryFormat> format) {
  Views views;
  views.to_host(tensor).resize_(C10_AS_INTARRAYREF_SLOW(sizes), format);
  views.write_back();
  return tensor;
}

Tensor& set_memory(Tensor& tensor, const c10::Storage& storage, IntArrayRef sizes, IntArrayRef strides, int64_t offset) {
  auto* impl = tensor.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(storage);
  impl->set_sizes_contiguous(sizes);
  if (!strides.empty()) impl->set_sizes_and_strides(sizes, strides);
  impl->set_storage_offset(offset);
  return tensor;
}

Tensor& set_view(Tensor& tensor, c10::Storage storage, c10::SymInt offset, SymIntArrayRef sizes, SymIntArrayRef strides) {
  return set_memory(tensor, storage, C10_AS_INTARRAYREF_SLOW(sizes), C10_AS_INTARRAYREF_SLOW(strides),
                    offset.guard_int(__FILE__, __LINE__));
}

Tensor& set_storage(Tensor& tensor, c10::Storage storage) {
  int64_t length = static_cast<int64_t>(storage.nbytes() / tensor.itemsize());
  return set_memory(tensor, storage, {length}, {}, 0);
}

Tensor& set_empty(Tensor& tensor) {
  Tensor nothing = at::empty({0}, tensor.options());
  return set_memory(tensor, nothing.storage(), {0}, {}, 0);
}

Tensor& set_tensor(Tensor& tensor, const Tensor& source) {
  return set_memory(tensor, source.storage(), source.sizes(), source.strides(), source.storage_offset());
}

Tensor as_strided(const Tensor& tensor, IntArrayRef sizes, IntArrayRef strides, Maybe<int64_t> offset) {
  return at::native::as_strided_tensorimpl(tensor, sizes, strides, offset);
}

Tensor reshape_alias(const Tensor& tensor, IntArrayRef sizes, IntArrayRef strides) {
  return at::native::as_strided_tensorimpl(tensor, sizes, strides, std::nullopt);
}

Tensor view(const Tensor& tensor, IntArrayRef sizes) { return at::native::view(tensor, sizes); }

// A product of 16-bit matrices that is added to fp32 sums. The CPU has no such kernel.
Tensor& add_widened_product(const Tensor& sums, const Tensor& left, const Tensor& right, c10::ScalarType dtype,
                            const c10::Scalar& beta, const c10::Scalar& alpha, Tensor& out) {
  return at::addmm_out(out, sums, left.to(dtype), right.to(dtype), beta, alpha);
}

void record_stream(Tensor&, c10::Stream) {}  // memory is free when its last tensor dies

Tensor host_view(const Tensor& tensor) {
  Views views;
  return views.to_host(tensor);
}

// Resize the storage of `tensor`, which all its views share. UntypedStorage.resize_ needs a CUDA build.
void resize_storage(const Tensor& tensor, int64_t bytes) {
  c10::StorageImpl* storage = tensor.storage().unsafeGetStorageImpl();
  c10::DataPtr memory = device_allocator()->allocate(bytes);
  size_t kept = std::min<size_t>(bytes, storage->nbytes());
  if (kept) std::memcpy(memory.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(memory));
  storage->set_nbytes(bytes);
}

}  // namespace
}  // namespace stand_in

TORCH_LIBRARY(stand_in, library) {
  library.def("host_view(Tensor tensor) -> Tensor");
  library.def("resize_storage(Tensor(a!) tensor, int bytes) -> ()");
}
TORCH_LIBRARY_IMPL(stand_in, CUDA, library) {
  library.impl("host_view", &stand_in::host_view);
  library.impl("resize_storage", &stand_in::resize_storage);
}

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&stand_in::run_on_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", &stand_in::empty);
  library.impl("empty_strided", &stand_in::empty_strided);
  library.impl("copy_", &stand_in::copy_);
  library.impl("_local_scalar_dense", &stand_in::local_scalar_dense);
  library.impl("resize_", &stand_in::resize_);
  library.impl("set_.source_Storage_storage_offset", &stand_in::set_view);
  library.impl("set_.source_Storage", &stand_in::set_storage);
  library.impl("set_", &stand_in::set_empty);
  library.impl("set_.source_Tensor", &stand_in::set_tensor);
  library.impl("as_strided", &stand_in::as_strided);
  library.impl("view", &stand_in::view);
  library.impl("_reshape_alias", &stand_in::reshape_alias);
  library.impl("record_stream", &stand_in::record_stream);
  library.impl("addmm.dtype_out", &stand_in::add_widened_product);
  // Without a kernel of its own, it would run as a loop that reads the offsets (native/GroupedMMUtils.h).
  library.impl("_grouped_mm", torch::CppFunction::makeFromBoxedFunction<&stand_in::run_on_host>());
}
