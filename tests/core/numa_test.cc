#include "core/numa.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace herring {
namespace {

NumaNodes nodes(std::vector<std::uint32_t> cores, std::vector<std::string> cores_of_node) {
  return nodes_of_cores(cores, cores_of_node);
}

TEST(NumaNodes, AreThoseOfTheCores) {
  const std::vector<std::string> two = {"0-3,8-11", "4-7,12-15"};
  EXPECT_EQ(nodes({0}, two), 1u);
  EXPECT_EQ(nodes({9, 11}, two), 1u);
  EXPECT_EQ(nodes({12}, two), 2u);
  EXPECT_EQ(nodes({5, 6}, {"0-3", "", "4-7", "8"}), 4u) << "a node without cores, or one that is not there";
}

TEST(NumaNodes, AllOrNoneAreAny) {
  EXPECT_EQ(nodes({0, 4}, {"0-3", "4-7"}), 0u);
  EXPECT_EQ(nodes({2}, {"0-3"}), 0u);
  EXPECT_EQ(nodes({2}, {"0-3", ""}), 0u) << "memory alone";
  EXPECT_EQ(nodes({99}, {"0-3", "4-7"}), 0u);
  EXPECT_EQ(nodes({0}, {}), 0u);
  EXPECT_EQ(nodes({0}, std::vector<std::string>(65, "0")), 0u);
  EXPECT_EQ(nodes({0}, {"x-y", "0-"}), 0u);
}

TEST(NumaNodes, NearIsOneOfThemOrNotKnown) {
  EXPECT_TRUE(is_near(1, 0b10));
  EXPECT_FALSE(is_near(0, 0b10));
  EXPECT_TRUE(is_near(0, 0));
  EXPECT_TRUE(is_near(kUnknownNode, 0b10));
  EXPECT_TRUE(is_near(64, 0b10));
}

TEST(NumaNodes, OfWhatIsNotThereAreNotKnown) { EXPECT_EQ(node_of_pci_device("ffff:ff:1f.7"), kUnknownNode); }

}  // namespace
}  // namespace herring
