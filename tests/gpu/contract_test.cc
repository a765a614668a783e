// The device contract on a real GPU. Built by build_tool.sh, outside of the ordinary tests.
#include <gtest/gtest.h>

#include "cuda/device.h"
#include "device/contract.h"

namespace herring::testing {
namespace {

class RealWorld final : public DeviceWorld {
 public:
  explicit RealWorld(std::shared_ptr<cuda::Driver> driver) : driver_(driver), device_(driver, DeviceId{0}) {
    theirs_ = device_.create_stream();
  }

  Device& device() override { return device_; }
  ForeignEvent fill_later(DeviceSpan memory, std::byte value) override {
    // A long copy before it makes it late.
    DeviceSpan scratch;
    device_.allocate(512 << 20, scratch).or_throw();
    device_.copy_inside(theirs_, scratch.subspan(0, 256 << 20), scratch.subspan(256 << 20, 256 << 20)).or_throw();
    bytes_.assign(memory.bytes, value);
    device_.copy_to_device(theirs_, memory, bytes_).or_throw();
    Ticket ticket;
    device_.record(theirs_, ticket).or_throw();
    return event_after(ticket);
  }
  ForeignStream plain_stream() override { return {theirs_.value}; }
  std::size_t too_much_memory() const override { return std::size_t{1} << 42; }
  bool faults_on_host() const override { return false; }  // Machines with unified addressing may read it.

 private:
  /// The contract wants a raw event; made here with the driver itself.
  ForeignEvent event_after(Ticket) {
    cuda::Event event = nullptr;
    cuda::Context context = nullptr;
    const cuda::Api& api = driver_->api();
    cuda::DeviceNumber number = 0;
    driver_->check(api.device_get(&number, 0), "cuDeviceGet").or_throw();
    driver_->check(api.primary_ctx_retain(&context, number), "cuDevicePrimaryCtxRetain").or_throw();
    driver_->check(api.ctx_push_current(context), "cuCtxPushCurrent").or_throw();
    driver_->check(api.event_create(&event, cuda::kEventDisableTiming), "cuEventCreate").or_throw();
    driver_->check(api.event_record(event, reinterpret_cast<cuda::Stream>(theirs_.value)), "cuEventRecord").or_throw();
    driver_->check(api.ctx_pop_current(&context), "cuCtxPopCurrent").or_throw();
    return {reinterpret_cast<std::uint64_t>(event)};
  }

  const std::shared_ptr<cuda::Driver> driver_;
  cuda::CudaDevice device_;
  StreamHandle theirs_;
  std::vector<std::byte> bytes_;
};

INSTANTIATE_TEST_SUITE_P(Gpu, DeviceContract,
                         ::testing::Values(DeviceFactory{"gpu",
                                                         [](std::string& reason) -> std::unique_ptr<DeviceWorld> {
                                                           try {
                                                             return std::make_unique<RealWorld>(cuda::Driver::open());
                                                           } catch (const Error& error) {
                                                             reason = error.what();
                                                             return nullptr;
                                                           }
                                                         }}),
                         [](const auto& test) { return test.param.name; });

}  // namespace
}  // namespace herring::testing
