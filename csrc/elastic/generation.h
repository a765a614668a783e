#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "control/hub.h"
#include "core/config.h"
#include "elastic/message.h"
#include "elastic/plan.h"
#include "runtime/runtime.h"

/// One generation of a job: an ordinary job, as the rendezvous put it together.
namespace herring::elastic {

/// Where this process finds the job.
struct Home {
  Config config;
  std::string host;           ///< Of the rendezvous, and of the hubs.
  std::uint16_t port = 0;     ///< Of the rendezvous.
  control::Member self;       ///< Its rank is a wish.
  std::uint32_t workers = 0;  ///< Of how many its launcher says that it is; 0 or 1: it does not.
  std::vector<std::string> fabric_search;
};

struct Generation {
  std::uint64_t number = 0;
  std::vector<std::uint64_t> members;  ///< Ids of its workers, by rank.
  std::shared_ptr<control::HubClient> hub;
  std::shared_ptr<runtime::Runtime> runtime;
};

/// Joins the hub as the message kGo says. Throws Error.
/// `is_over`: true where the generation is over already.
std::shared_ptr<control::HubClient> join_hub(const Home& home, control::Role role, const Message& go, Instant deadline,
                                             std::function<bool()> is_over);
/// The settings in a generation.
Config config_of(const Home& home, const Message& go);
/// Connects a worker. Throws Error where somebody was lost meanwhile.
Generation build(const Home& home, const Message& go, Instant deadline, std::function<bool()> is_over);

/// Each worker's summary, by rank, through the generation's own data plane. Throws Error. `name`: the same on all.
std::vector<Summary> exchange(runtime::Runtime& runtime, const std::string& name, const Summary& mine);

}  // namespace herring::elastic
