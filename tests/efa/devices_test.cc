#include <dlfcn.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "device/fake_gpu.h"
#include "efa/fabric_under_test.h"

// Memory of a GPU that the network card reads and writes by itself. No such card is here: strict_fabric.cc plays one.
namespace herring::efa {
namespace {

using testing::FakeGpu;
using transport::Completion;

FakeGpu& gpu() {
  static auto* const one = new FakeGpu();
  return *one;
}

void* reach(std::uint64_t address, std::uint64_t bytes) { return gpu().alias(address, bytes); }

class Devices : public ::testing::Test {
 protected:
  /// False, with the reason printed, where there is no libfabric.
  bool open(const char* lacks = "") {
    setenv("STRICT_FABRIC_LACKS", lacks, 1);
    const FabricOptions options = strict_options();
    std::string reason;
    fabric_ = fabric_under_test(reason, options);
    if (fabric_ == nullptr) {
      std::cout << "skipped: " << reason << "\n";
      return false;
    }
    library_ = dlopen(HERRING_STRICT_FABRIC, RTLD_NOW | RTLD_NOLOAD);
    call<void (*)(void* (*)(std::uint64_t, std::uint64_t))>("strict_fabric_reach")(&reach);
    call<void (*)()>("strict_fabric_forget")();
    return true;
  }
  template <class Function>
  Function call(const char* name) const {
    return reinterpret_cast<Function>(dlsym(library_, name));
  }
  std::string fault() const { return call<const char* (*)()>("strict_fabric_fault")(); }
  std::uint64_t device_bytes() const { return call<std::uint64_t (*)()>("strict_fabric_device_bytes")(); }
  std::uint64_t uses() const { return call<std::uint64_t (*)()>("strict_fabric_uses")(); }

  static std::span<std::byte> on_device(std::size_t bytes) {
    return {reinterpret_cast<std::byte*>(gpu().allocate(bytes)), bytes};
  }
  static std::byte* seen(std::span<std::byte> memory) {
    return gpu().alias(reinterpret_cast<std::uint64_t>(memory.data()), memory.size());
  }
  /// Until so many posts have ended, or for a while.
  static std::vector<Completion> await(std::vector<transport::Endpoint*> endpoints, std::size_t count) {
    std::vector<Completion> done;
    std::array<Completion, 8> batch;
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (done.size() < count && std::chrono::steady_clock::now() < end) {
      for (transport::Endpoint* endpoint : endpoints) {
        const std::size_t found = endpoint->poll(batch);
        for (std::size_t i = 0; i < found; ++i) done.push_back(batch[i]);
        endpoint->wait(std::chrono::steady_clock::now() + std::chrono::microseconds(200));
      }
    }
    return done;
  }

  std::unique_ptr<FabricUnderTest> fabric_;

 private:
  void* library_ = nullptr;
};

/// A user would have wrong gradients, or a crash, where a card is given memory that the host was meant for.
TEST_F(Devices, BytesGoFromDeviceToDevice) {
  if (!open()) GTEST_SKIP();
  ASSERT_EQ(fabric_->fabric.no_devices(), "");
  const auto one = fabric_->open_endpoint();
  const auto two = fabric_->open_endpoint();
  one->add_peer(PeerId{2}, two->address());
  constexpr std::size_t kBytes = 3 << 20;
  const auto from = on_device(kBytes);
  const auto to = on_device(kBytes);
  for (std::size_t i = 0; i < kBytes; ++i) seen(from)[i] = static_cast<std::byte>(i * 7 >> 3);
  memory::Domain& domain = fabric_->domain;
  const memory::Buffer source = domain.adopt(from, {MemoryKind::kDevice, 0}, nullptr);
  const memory::Buffer target = domain.adopt(to, {MemoryKind::kDevice, 0}, nullptr);
  EXPECT_EQ(source.kind(), MemoryKind::kDevice);
  ASSERT_TRUE(two->post_receive(Tag{9}, to, {}, Token{1}).is_ok());
  ASSERT_TRUE(one->post_send(PeerId{2}, Tag{9}, from, {}, Token{2}).is_ok());
  EXPECT_GE(uses(), 1u);
  const std::vector<Completion> done = await({one.get(), two.get()}, 2);
  ASSERT_EQ(done.size(), 2u);
  for (const Completion& each : done) EXPECT_TRUE(each.status.is_ok()) << each.status.to_string();
  EXPECT_EQ(std::memcmp(seen(from), seen(to), kBytes), 0);
  EXPECT_EQ(device_bytes(), 2 * kBytes);
  EXPECT_EQ(uses(), 0u);
  EXPECT_EQ(fault(), "");
  one->shut_down();
  two->shut_down();
}

TEST_F(Devices, AMessageIsOfOneKindOfMemory) {
  if (!open()) GTEST_SKIP();
  const auto one = fabric_->open_endpoint();
  const auto memory = on_device(8192);
  const memory::Buffer device = fabric_->domain.adopt(memory, {MemoryKind::kDevice, 0}, nullptr);
  const memory::Buffer host = fabric_->domain.allocate(4096);
  EXPECT_FALSE(one->post_receive(Tag{1}, host.bytes(), memory, Token{1}).is_ok());
  EXPECT_EQ(fault(), "host memory and a device's in one message");
  one->shut_down();
}

TEST_F(Devices, MemoryOfADeviceIsNoHostMemory) {
  if (!open()) GTEST_SKIP();
  const auto memory = on_device(8192);
  EXPECT_THROW(static_cast<void>(fabric_->domain.hold(memory, MemoryKind::kHost)), Error);
  EXPECT_EQ(fault(), "memory was registered with another interface than its own");
  std::vector<std::byte> here(8192);
  EXPECT_THROW(static_cast<void>(fabric_->domain.hold(here, MemoryKind::kDevice)), Error);
}

TEST_F(Devices, ARegistrationThatIsRefusedSaysWhatAndWhere) {
  if (!open("register")) GTEST_SKIP();
  ASSERT_EQ(fabric_->fabric.no_devices(), "");
  try {
    static_cast<void>(fabric_->domain.adopt(on_device(8192), {MemoryKind::kDevice, 3}, nullptr));
    FAIL() << "it was taken";
  } catch (const Error& error) {
    const std::string text = error.what();
    for (const char* part : {"fi_mr_regattr of 8192 bytes of GPU 3", "nvidia_peermem", "Cannot allocate memory"}) {
      EXPECT_NE(text.find(part), std::string::npos) << text;
    }
  }
  EXPECT_NO_THROW(static_cast<void>(fabric_->domain.allocate(8192)));
}

/// Whoever has no such card keeps what he had: the same provider, and no memory to register.
TEST_F(Devices, ACardWithoutThemIsUsedAsEver) {
  struct Case {
    const char* lacks;
    const char* text;
  };
  std::string reason;
  for (const Case& each : {Case{"hmem", "takes no GPU memory (fi_getinfo with FI_HMEM"}, Case{"p2p", "fi_setopt"}}) {
    if (!open(each.lacks)) GTEST_SKIP();
    EXPECT_NE(fabric_->fabric.no_devices().find(each.text), std::string::npos) << fabric_->fabric.no_devices();
    EXPECT_EQ(fabric_->fabric.provider(), fabric_under_test(reason)->fabric.provider());
    EXPECT_FALSE(fabric_->domain.needs_registration());
    EXPECT_EQ(fabric_->open_endpoint()->memory(), nullptr);
    EXPECT_EQ(fabric_->fabric.no_devices(), probe(strict_options()).no_devices);
  }
}

/// What libfabric before 1.18 does not know is not insisted on.
TEST_F(Devices, OptionsThatAProviderDoesNotKnowAreLeftOut) {
  if (!open("options")) GTEST_SKIP();
  EXPECT_EQ(fabric_->fabric.no_devices(), "");
  EXPECT_NE(fabric_->open_endpoint()->memory(), nullptr);
}

TEST_F(Devices, TheyAreAskedForOnlyWhereTheyAreWanted) {
  setenv("STRICT_FABRIC_LACKS", "", 1);
  FabricOptions options = strict_options();
  options.takes_devices = false;
  std::string reason;
  const auto fabric = fabric_under_test(reason, options);
  if (fabric == nullptr) GTEST_SKIP() << reason;
  EXPECT_NE(fabric->fabric.no_devices(), "");
  EXPECT_FALSE(fabric->domain.needs_registration());
}

}  // namespace
}  // namespace herring::efa
