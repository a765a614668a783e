#include "runtime/name_uses.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <string>

#include "runtime/communicator.h"
#include "runtime/places.h"

namespace herring::runtime {
namespace {

using namespace testing;

TEST(NameUses, CountsEachNameForItself) {
  NameUses uses;
  std::map<std::uint64_t, std::uint64_t> plain;
  std::mt19937_64 random(7);
  for (int i = 0; i < 200'000; ++i) {
    const std::uint64_t name = name_key(std::to_string(random() % 30'000));
    ASSERT_EQ(uses.next(name), plain[name]++);
  }
  EXPECT_EQ(uses.size(), plain.size());
}

TEST(NameUses, TakesWhatIsStatedAtMost) {
  NameUses uses;
  constexpr std::size_t kMax = std::size_t{3} << 14;
  for (std::uint64_t i = 0; i < kMax; ++i) ASSERT_EQ(uses.next(name_key("step" + std::to_string(i)), kMax), 0u);
  EXPECT_EQ(uses.next(name_key("one more"), kMax), std::nullopt);
  EXPECT_EQ(uses.next(name_key("step7"), kMax), 1u) << "a name that is known is taken";
  EXPECT_LE(uses.bytes(), NameUses::kMaxBytes * kMax / NameUses::kMaxNames);
}

/// A job that names its tensors by step, in each mode.
TEST(NameUses, EverNewNamesAndUsedOnesGoSideBySide) {
  on_every_place(2, [](Runtime& runtime) {
    for (int step = 0; step < 300; ++step) {
      for (const std::string& name : {"loss." + std::to_string(step), std::string("weight")}) {
        std::vector<float> values(8, 1.0f);
        Request request = all_reduce(values);
        request.name = name;
        const auto work = runtime.submit(request);
        ASSERT_TRUE(work->wait(in_seconds(60)));
        ASSERT_TRUE(work->status().is_ok()) << work->status().to_string();
        ASSERT_EQ(values.back(), 2.0f);
      }
    }
  });
}

}  // namespace
}  // namespace herring::runtime
