#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "core/clock.h"
#include "core/log.h"
#include "core/status.h"
#include "core/thread.h"
#include "elastic/elastic_runtime.h"
#include "elastic/rendezvous_client.h"

namespace herring::elastic {
namespace {

using runtime::ServerCounters;
using runtime::ServerProcess;
using Clock = std::chrono::steady_clock;

void add(ServerCounters& all, const ServerCounters& one) {
  all.server = one.server;
  all.place = one.place;
  all.bytes_received += one.bytes_received;
  all.bytes_sent += one.bytes_sent;
  all.ops = all.ops.value_or(0) + one.ops.value_or(0);
  all.memory_bound_bytes = std::max(all.memory_bound_bytes, one.memory_bound_bytes);
  all.record_bound_bytes = std::max(all.record_bound_bytes, one.record_bound_bytes);
}

}  // namespace

/// Each generation is served by a thread of its own: in a planned switch one drains while the next begins.
class ElasticServer::Impl final {
 public:
  Impl(const Home& given, Instant deadline) : home_(given), logger_(logger_options(given.config, "server")) {
    RendezvousClientOptions options;
    options.host = home_.host;
    options.port = home_.port;
    options.secret = home_.config.secret;
    options.dead_after = duration_of(home_.config.dead_after_s);
    begin_by_ = Clock::now() + duration_of(home_.config.join_timeout_s);
    options.enter.role = control::Role::kServer;
    options.enter.rank = home_.self.rank;
    options.enter.pid = home_.self.pid;
    options.enter.host = home_.self.host_name;
    rendezvous_ = std::make_unique<RendezvousClient>(options, deadline);
  }

  ~Impl() { end_all(); }

  Status run() {
    while (!is_stopped()) {
      Message message;
      const Instant until = std::min(Clock::now() + std::chrono::seconds(60), begin_by_);
      if (rendezvous_->next(message, until) && handle(message)) break;
      if (Clock::now() >= begin_by_) {
        begin_by_ = Instant::max();
        ask();
      }
      collect();
    }
    end_all();
    rendezvous_->close();
    if (is_stopped()) return Status(Code::kCancelled, "the server was stopped");
    // What ended the generation here; the rendezvous knows only who ended because of it.
    const std::scoped_lock lock(mutex_);
    return outcome_.is_ok() || why_broken_.empty() ? outcome_ : Status(Code::kPeerLost, why_broken_);
  }

  void stop() {
    {
      const std::scoped_lock lock(mutex_);
      stopped_ = true;
    }
    rendezvous_->wake();
  }

  bool is_stopped() const {
    const std::scoped_lock lock(mutex_);
    return stopped_;
  }

  ServerCounters counters() const {
    const std::scoped_lock lock(mutex_);
    ServerCounters all = past_;
    all.ops = past_.ops.value_or(0);
    for (const auto& [number, serving] : serves_) {
      if (serving->process) add(all, serving->process->counters());
    }
    return all;
  }

 private:
  struct Serving {
    std::thread thread;
    std::unique_ptr<ServerProcess> process;  // Guarded by mutex, as all below.
    bool is_over = false;
    bool is_unwanted = false;
    bool is_planned = false;
  };

  /// True where the job is over.
  bool handle(const Message& message) {
    switch (message.kind) {
      case MessageKind::kGo:
        begin(message);
        return false;
      case MessageKind::kBreak: {
        end_one(message.generation);
        if (!message.is_planned) ready(message.generation);
        return false;
      }
      case MessageKind::kSwitch:
        current_ = message.generation;
        return false;
      case MessageKind::kMissing:
        if (message.generation > 0) return false;  // It is taken in when that can be.
        outcome_ = Status(Code::kTimeout, "the job did not begin in time: " + message.text);
        return true;
      case MessageKind::kEnd:
        if (!message.is_elastic) outcome_ = Status(Code::kPeerLost, message.text);
        return true;
      default:
        return false;
    }
  }

  void ready(std::uint64_t generation) {
    Message message;
    message.kind = MessageKind::kReady;
    message.generation = generation;
    rendezvous_->send(std::move(message));
  }

  /// Whether the job has begun at all.
  void ask() {
    Message message;
    message.kind = MessageKind::kQuery;
    rendezvous_->send(std::move(message));
  }

  void begin(const Message& go) {
    begin_by_ = Instant::max();
    if (!go.is_planned) current_ = go.generation;
    auto serving = std::make_shared<Serving>();
    serving->is_planned = go.is_planned;
    {
      const std::scoped_lock lock(mutex_);
      serves_[go.generation] = serving;
      if (!go.is_planned) why_broken_.clear();
    }
    serving->thread = start_thread("herring-serve", [this, go, serving] { serve(go, *serving); });
  }

  void serve(const Message& go, Serving& serving) {
    std::string failure;
    bool was_told = false;  // It knows nothing of its own.
    try {
      const Instant deadline = Clock::now() + duration_of(home_.config.join_timeout_s);
      const auto is_unwanted = [this, &serving, &was_told] {
        const std::scoped_lock lock(mutex_);
        return was_told = serving.is_unwanted;
      };
      ServerProcess::Options options{config_of(home_, go),
                                     join_hub(home_, control::Role::kServer, go, deadline, is_unwanted), go.rank,
                                     home_.fabric_search};
      auto process = std::make_unique<ServerProcess>(std::move(options), deadline);
      ServerProcess* const own = process.get();
      bool is_wanted = false;
      {
        const std::scoped_lock lock(mutex_);
        serving.process = std::move(process);
        is_wanted = !serving.is_unwanted;
      }
      if (is_wanted) {
        const Status ended = own->run();
        failure = ended.message();
        was_told = ended.code() == Code::kCancelled;
      }
    } catch (const std::exception& error) {
      failure = error.what();
    }
    if (!failure.empty()) logger_.log(LogLevel::kInfo, "generation " + std::to_string(go.generation) + ": " + failure);
    {
      const std::scoped_lock lock(mutex_);
      serving.is_over = true;
      if (!was_told && !serving.is_planned) why_broken_ = failure;
      if (serving.process) add(past_, serving.process->counters());
    }
    std::unique_ptr<ServerProcess> last;
    {
      const std::scoped_lock lock(mutex_);
      last = std::move(serving.process);
    }
    last.reset();
    if (serving.is_planned && !failure.empty()) {
      Message message;
      message.kind = MessageKind::kBroken;
      message.generation = go.generation;
      message.text = failure;
      rendezvous_->send(std::move(message));
    }
    rendezvous_->wake();
  }

  /// Threads that have ended; the present generation's end is told.
  void collect() {
    std::map<std::uint64_t, std::shared_ptr<Serving>> over;
    {
      const std::scoped_lock lock(mutex_);
      for (const auto& [number, serving] : serves_) {
        if (serving->is_over) over.emplace(number, serving);
      }
      for (const auto& [number, serving] : over) serves_.erase(number);
    }
    for (const auto& [number, serving] : over) {
      serving->thread.join();
      if (number == current_) ready(number);
    }
  }

  void end_one(std::uint64_t generation) {
    std::shared_ptr<Serving> serving;
    {
      const std::scoped_lock lock(mutex_);
      const auto found = serves_.find(generation);
      if (found == serves_.end()) return;
      serving = found->second;
      serves_.erase(found);
      serving->is_unwanted = true;
      if (serving->process) serving->process->stop();
    }
    serving->thread.join();
  }

  void end_all() {
    for (;;) {
      std::uint64_t generation = 0;
      {
        const std::scoped_lock lock(mutex_);
        if (serves_.empty()) return;
        generation = serves_.begin()->first;
      }
      end_one(generation);
    }
  }

  const Home home_;
  Logger logger_;
  std::unique_ptr<RendezvousClient> rendezvous_;
  std::uint64_t current_ = 0;
  Instant begin_by_ = Instant::max();  // The first generation.
  Status outcome_;
  mutable std::mutex mutex_;
  bool stopped_ = false;  // Guarded by mutex, as all below.
  std::map<std::uint64_t, std::shared_ptr<Serving>> serves_;
  std::string why_broken_;  // The generation that was formed last.
  ServerCounters past_;
};

ElasticServer::ElasticServer(const Home& home, Instant deadline) : impl_(std::make_unique<Impl>(home, deadline)) {}
ElasticServer::~ElasticServer() = default;
Status ElasticServer::run() { return impl_->run(); }
void ElasticServer::stop() { impl_->stop(); }
ServerCounters ElasticServer::counters() const { return impl_->counters(); }

}  // namespace herring::elastic
