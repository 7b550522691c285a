// What autograd's engine asks of a CUDA device, answered on a machine without one.
//
// This library is loaded before torch: autograd's engine asks getAccelerator which devices have
// streams, and takes the first answer that the process knows.

#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace at::accelerator {
__attribute__((visibility("default"))) std::optional<c10::DeviceType> getAccelerator(bool) {
  return c10::DeviceType::CUDA;
}
}  // namespace at::accelerator

namespace {

const c10::Device DEVICE{c10::DeviceType::CUDA, 0};
const c10::Stream STREAM{c10::Stream::DEFAULT, DEVICE};

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device exchangeDevice(c10::Device) const override { return DEVICE; }
  c10::Device getDevice() const override { return DEVICE; }
  c10::Stream getStream(c10::Device) const noexcept override { return STREAM; }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return STREAM; }
  void record(void**, const c10::Stream&, c10::DeviceIndex, c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
};

struct Hooks final : at::CUDAHooksInterface {
  Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
};

}  // namespace

namespace c10::impl {
C10_REGISTER_GUARD_IMPL(CUDA, Guard)
}
namespace at {
// before the hooks of a torch built for CUDA on a machine without a GPU
C10_REGISTER_TYPED_CLASS_WITH_PRIORITY(CUDAHooksRegistry, "CUDAHooks", c10::REGISTRY_PREFERRED, Hooks)
}
