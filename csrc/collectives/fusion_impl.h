#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "collectives/bucket_memory.h"
#include "collectives/fusion.h"
#include "collectives/recycled_map.h"

namespace herring::collectives {

inline Instant now() { return std::chrono::steady_clock::now(); }

/// Who drives: a thread that waits for a ticket, else the background thread; one at a time. It holds the lock, and lets
/// go of it while it waits, copies, or calls out.
class Fusion::Impl final : public runtime::BackgroundCaller, public std::enable_shared_from_this<Fusion::Impl> {
 public:
  Impl(std::shared_ptr<runtime::Communicator> runtime, GroupId group, std::span<const std::uint32_t> ranks,
       FusionSettings settings, GoAlone go_alone);
  ~Impl() override;

  TensorRow place(std::span<const NamedBytes> tensors);
  Counters counters() const;
  std::optional<Ticket> submit(const Tensor& tensor);
  std::optional<Ticket> queue_outside(std::string_view name, std::shared_ptr<void> owner);
  bool go_outside(std::string_view name);
  State state(Ticket ticket) const;
  bool has_pending(std::string_view name) const;
  Outcome outcome(Ticket ticket) const;
  State poll(Ticket ticket);
  State wait(Ticket ticket, Instant deadline);
  Status forget(Ticket ticket);
  void on_end(Ticket ticket, std::function<void(State)> callback);
  void went_outside(std::string_view name);
  void came_back(std::string_view name);
  void pause();
  void resume();
  void close(Instant deadline, Leaving leaving);
  runtime::Awaited awaited(Ticket ticket) const;
  std::shared_ptr<void> block(Ticket ticket);
  Outlook outlook() const override;

 private:
  using Lock = std::unique_lock<std::mutex>;
  static constexpr std::size_t kManyNames = 1 << 16;

  struct Record {
    std::string name;
    Ticket* slot = nullptr;  // Its name's in names_, while the name is this use's.
    TensorSpec spec;
    std::span<const std::byte> source;
    std::span<std::byte> result;
    std::shared_ptr<void> lease;  // of both
    std::shared_ptr<void> owner;
    bool is_outside = false;  // It was never for a bucket.
    Ticket next = 0;          // The use of the name after this one; 0: none.
    State state = State::kPending;
    Status status;
    std::vector<std::function<void(State)>> on_end;
  };

  /// One bucket under way. Shared with the callback of its operation.
  struct Flight {
    Batch batch;
    BucketMemory::Bucket bucket;
    std::vector<std::span<std::byte>> results;
    std::vector<double> postscales;
    std::shared_ptr<runtime::Work> work;
    bool is_in_place = false;           ///< The bucket is the tensors' own memory.
    std::atomic<bool> is_taken{false};  ///< By whoever unpacks it.
    std::atomic<int> waiters{0};        ///< Who waits for it, and lands it then.
    bool has_callback = false;          ///< guarded by mutex_
  };

  /// The round or plan under way.
  struct Exchange {
    std::shared_ptr<runtime::Work> work;
    std::vector<std::uint64_t> words;
    std::vector<std::byte> plan;
    bool is_plan = false;
    Instant warn_at = Instant::max();
  };

  void run_background();
  void wake_driver(const Lock& lock, Instant when = now());
  /// Takes one step, where it waits not beyond `until`. False where there is none now; then `next_look` is set.
  bool step(Lock& lock, bool is_waiter, Instant until, Instant& next_look);
  void drive_exchange(Lock& lock, Instant until);
  void start_round(FusionStep::Round round);
  void start_plan(FusionStep::Plan plan);
  void end_exchange(Lock& lock);
  void warn_of_stall(Instant now);
  void start_batches(Lock& lock, std::vector<Batch> batches, bool is_waiter);
  std::shared_ptr<Flight> start(Lock& lock, Batch batch);
  void fill(Flight& flight, std::span<const Record* const> records);
  std::shared_ptr<std::byte> row_of(const Batch& batch, std::span<const Record* const> records) const;
  void watch(const std::shared_ptr<Flight>& flight);
  bool watch_all(Lock& lock);
  void land(const std::shared_ptr<Flight>& flight);
  bool help(Lock& lock, Ticket ticket, Instant until);
  std::shared_ptr<Flight> flight_of(Ticket ticket) const;
  void go_alone(Lock& lock, std::span<const Ticket> tickets);
  void end(Lock& lock, std::span<const Ticket> tickets, State state, const Status& status);
  void break_down(Lock& lock, const Status& status);
  void end_pending(Lock& lock);
  Status closed() const;
  std::string names_of(std::span<const Ticket> tickets) const;
  Status explained(const Status& status, std::span<const Ticket> tickets) const;
  Ticket& slot_of(const std::string& name);
  Ticket latest_use(std::string_view name) const;
  void free_name(Record& record);
  Status lend(Record& record) const;
  std::optional<Placement> admit(const Record& record);
  const PlacedMemory::Place* place_of(const Record& record) const;
  std::optional<Ticket> queue_outside(Lock& lock, std::string_view name, std::shared_ptr<void> owner);
  Ticket enqueue(Ticket& latest, Record record);
  void begin_next(Lock& lock);
  void begin_queued(Lock& lock, Ticket ticket);
  void drive(Lock& lock, bool is_waiter, Instant limit);
  void stop_driving(Lock& lock);

  const std::shared_ptr<runtime::Communicator> runtime_;
  const GroupId group_;
  const FusionSettings settings_;
  const GoAlone go_alone_;
  BucketMemory memory_;

  mutable std::mutex mutex_;
  std::condition_variable ended_;       // a ticket, or the driver's turn
  std::condition_variable background_;  // something for the background thread
  // Guarded by mutex_, all below.
  FusionEngine engine_;
  RecycledMap<Ticket, Record> records_;
  std::unordered_map<std::string, Ticket> names_;  // The latest use; 0: none. They stay, for they come again.
  std::size_t most_names_ = kManyNames;            // Then those that are of no use go.
  std::vector<Ticket> next_ones_;                  // Their turn has come.
  bool is_beginning_ = false;                      // Somebody goes through them.
  std::vector<Ticket> going_alone_;                // What go_alone_ is being called for.
  std::size_t landing_ = 0;                        // Threads that end a bucket's tensors.
  std::optional<Exchange> exchange_;
  std::vector<std::shared_ptr<Flight>> flights_;
  PlacedMemory places_;
  Counters counters_;
  std::thread thread_;
  Instant background_until_ = Instant::max();  ///< What the background thread sleeps until.
  Ticket next_ticket_;
  std::size_t waiters_ = 0;  // But those who wait for a bucket.
  std::size_t helpers_ = 0;  // Those.
  bool is_driven_ = false;
  bool background_sleeps_ = false;
  Leaving leaving_ = Leaving::kJob;  // Where it is being closed.
  bool is_closed_ = false;
};

}  // namespace herring::collectives
