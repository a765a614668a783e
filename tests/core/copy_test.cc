#include "core/copy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <stdexcept>
#include <vector>

namespace herring {
namespace {

TEST(Copy, CopiesEveryByteAndNoOtherAtAnyAlignment) {
  std::mt19937 random(3);
  std::vector<std::byte> source(200000);
  for (std::byte& byte : source) byte = static_cast<std::byte>(random());
  for (int round = 0; round < 400; ++round) {
    const std::size_t bytes = random() % (round % 2 == 0 ? 5000 : 150000);
    const std::size_t from = random() % 100;
    const std::size_t to = random() % 100;
    std::vector<std::byte> target(bytes + 200, std::byte{0x5A});
    copy_bytes(std::span(source).subspan(from, bytes), std::span(target).subspan(to, bytes), round % 3 == 0);
    ASSERT_TRUE(std::equal(target.begin() + static_cast<std::ptrdiff_t>(to),
                           target.begin() + static_cast<std::ptrdiff_t>(to + bytes),
                           source.begin() + static_cast<std::ptrdiff_t>(from)))
        << bytes;
    const auto spoiled = std::ranges::count_if(target, [](std::byte b) { return b != std::byte{0x5A}; });
    ASSERT_LE(static_cast<std::size_t>(spoiled), bytes);
    ASSERT_TRUE(std::ranges::all_of(std::span(target).first(to), [](std::byte b) { return b == std::byte{0x5A}; }));
    ASSERT_TRUE(
        std::ranges::all_of(std::span(target).subspan(to + bytes), [](std::byte b) { return b == std::byte{0x5A}; }));
  }
}

TEST(Copy, RefusesDifferentSizes) {
  std::vector<std::byte> a(10);
  std::vector<std::byte> b(11);
  EXPECT_THROW(copy_bytes(a, b), std::invalid_argument);
}

}  // namespace
}  // namespace herring
