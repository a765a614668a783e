#include "elastic/journal.h"

#include <gtest/gtest.h>

#include <string>

namespace herring::elastic {
namespace {

void submit(Journal& journal, std::uint32_t group, std::string_view name) {
  Journal::Submission submission;
  submission.group = group;
  submission.name = name;
  journal.forget(journal.submit(submission));
}

/// A job that names its tensors by step would fill the memory of all workers, and the blobs they send each other.
TEST(ElasticJournal, NamesAreBounded) {
  Journal journal;
  journal.add_group(7);
  for (std::size_t i = 0; i < Journal::kMaxNames; ++i) {
    const std::string name = "step" + std::to_string(i);
    const std::uint32_t group = i % 2 == 0 ? 0 : 7;
    ASSERT_TRUE(journal.has_room(group, name));
    submit(journal, group, name);
  }
  EXPECT_EQ(journal.names(), Journal::kMaxNames);
  EXPECT_FALSE(journal.has_room(0, "one more"));
  EXPECT_FALSE(journal.has_room(0, "step1")) << "a name is its group's own";
  EXPECT_TRUE(journal.has_room(7, "step1"));
  EXPECT_TRUE(journal.has_room(0, std::nullopt));
  submit(journal, 7, "step1");
  EXPECT_EQ(journal.names(), Journal::kMaxNames);
  journal.remove_group(7);
  EXPECT_EQ(journal.names(), Journal::kMaxNames / 2);
  EXPECT_TRUE(journal.has_room(0, "one more"));
}

TEST(ElasticJournal, WhoComesInCountsTheNamesOfTheOthers) {
  Journal journal;
  submit(journal, 0, "own");
  GroupRecord start;
  start.uses = {{1, 1}, {2, 5}, {3, 1}};
  journal.begin_at(start);
  EXPECT_EQ(journal.names(), 3u);
}

}  // namespace
}  // namespace herring::elastic
