#include "bindings/c/herring.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bindings/c/job.h"
#include "core/clock.h"
#include "core/config.h"
#include "core/process.h"
#include "runtime/own_member.h"
#include "runtime/runtime.h"

namespace {

using namespace herring;

thread_local std::string last_error;

constexpr std::uint32_t kFirstGroupOfOthers = 1u << 22;
constexpr std::chrono::seconds kLongestClose{30};

herring_code failed(Code code, std::string text) {
  last_error = std::move(text);
  return static_cast<herring_code>(code);
}
herring_code failed(const Status& status) { return failed(status.code(), status.message()); }

/// No exception crosses the border.
template <class Call>
herring_code guarded(const Call& call) noexcept {
  try {
    return call();
  } catch (const Error& error) {
    return failed(error.status());
  } catch (const std::bad_alloc&) {
    return HERRING_UNAVAILABLE;
  } catch (const std::exception& error) {
    return failed(Code::kInternal, error.what());
  }
}

Duration seconds(double value) {
  if (!(value >= 0))
    throw Error(Code::kInvalidArgument, "the timeout is " + std::to_string(value) + " s; it must be 0 or more");
  return duration_of(value);
}
Instant in(double value) { return std::chrono::steady_clock::now() + seconds(value); }

/// A struct of the caller's, which may be of an earlier version and shorter.
template <class Struct>
Struct read(const Struct* given, const char* what) {
  Struct value{};
  if (given == nullptr || given->struct_bytes < sizeof(value.struct_bytes)) {
    throw Error(Code::kInvalidArgument, std::string(what) + " is null, or its struct_bytes is not set to its size");
  }
  std::memcpy(&value, given, std::min(given->struct_bytes, sizeof value));
  return value;
}

void require(const void* pointer, const char* what) {
  if (pointer == nullptr) throw Error(Code::kInvalidArgument, std::string(what) + " is null");
}

std::pair<std::string, std::uint16_t> split(std::string_view hub) {
  const std::size_t colon = hub.rfind(':');
  std::uint32_t port = 0;
  bool is_number = colon != std::string_view::npos && colon > 0 && colon + 1 < hub.size() && hub.size() - colon <= 6;
  for (std::size_t i = colon + 1; is_number && i < hub.size(); ++i) {
    is_number = hub[i] >= '0' && hub[i] <= '9';
    port = port * 10 + static_cast<std::uint32_t>(hub[i] - '0');
  }
  if (!is_number || port == 0 || port > 0xFFFF) {
    throw Error(Code::kInvalidArgument,
                "the hub is '" + std::string(hub) +
                    "'; it must be host:port of worker 0, the same for all workers (options.hub, or HERRING_HUB)");
  }
  std::string_view host = hub.substr(0, colon);
  if (host.size() > 2 && host.front() == '[' && host.back() == ']') host = host.substr(1, host.size() - 2);
  return {std::string(host), static_cast<std::uint16_t>(port)};
}

std::uint64_t random_id() {
  std::random_device source;
  return ((std::uint64_t{source()} << 32 | source()) >> 1) + 1;
}

std::shared_ptr<control::Hub> open_hub(const Config& config, const std::string& host, std::uint16_t port,
                                       std::uint32_t workers) {
  control::HubOptions options;
  options.listen_host = host == "localhost" ? "127.0.0.1" : host;
  options.ports = {port};
  options.workers = workers;
  options.servers = config.servers;
  options.secret = config.secret;
  options.job_id = random_id();
  options.heartbeat = seconds(config.heartbeat_s);
  options.dead_after = seconds(config.dead_after_s);
  options.logger = std::make_shared<Logger>(logger_options(config, "rank 0"));
  options.lead = runtime::own_member(control::Role::kWorker, 0);
  return std::make_shared<control::Hub>(options);
}

std::unique_ptr<herring_job> join(const herring_join_options& options) {
  const Config config = read_config(process_environment(), {}).config;
  if (config.elastic == Toggle::kOn) throw Error(Code::kInvalidArgument, "the C interface does not join elastic jobs");
  if (options.rank >= options.size) {
    throw Error(Code::kInvalidArgument, "rank is " + std::to_string(options.rank) + " and size " +
                                            std::to_string(options.size) + "; ranks are from 0 to size - 1");
  }
  const auto [host, port] = split(options.hub == nullptr ? std::string_view(config.hub) : options.hub);
  const Instant deadline = in(options.timeout_s > 0 ? options.timeout_s : config.join_timeout_s);
  auto job = std::make_unique<herring_job>();
  if (options.rank == 0) job->hub = open_hub(config, host, port, options.size);
  control::HubClientOptions hub;
  hub.host = host;
  hub.ports = {port};
  hub.secret = config.secret;
  hub.self = runtime::own_member(control::Role::kWorker, options.rank);
  hub.workers = options.size;
  hub.servers = config.servers;
  job->client = std::make_shared<control::HubClient>(hub, deadline);
  runtime::RuntimeOptions made;
  made.config = config;
  made.hub = job->client;
  made.rank = options.rank;
  job->runtime = std::make_shared<runtime::Runtime>(made, deadline);
  job->operations = std::make_shared<collectives::Operations>(job->runtime, config);
  return job;
}

runtime::Request request_of(const herring_job& job, const herring_request& given) {
  runtime::Request request;
  request.group = GroupId{given.group};
  if (given.name != nullptr) request.name = given.name;
  request.is_waited_for = (given.flags & HERRING_WAITED_FOR) != 0;
  if (given.timeout_s != 0) request.timeout = seconds(given.timeout_s);
  OpDescriptor& descriptor = request.descriptor;
  descriptor.collective = static_cast<Collective>(given.collective);
  descriptor.dtype = static_cast<DataType>(given.dtype);
  if (given.collective < HERRING_ALL_REDUCE || given.collective > HERRING_BARRIER) {
    throw Error(Code::kInvalidArgument,
                "collective is " + std::to_string(given.collective) + "; it must be a value of herring_collective");
  }
  if (descriptor.collective == Collective::kBarrier) {
    descriptor.dtype = DataType::kUInt8;
    return request;
  }
  if (given.dtype < HERRING_FLOAT32 || given.dtype > HERRING_BOOL) {
    throw Error(Code::kInvalidArgument,
                "dtype is " + std::to_string(given.dtype) + "; it must be a value of herring_dtype");
  }
  if (descriptor.collective == Collective::kAllReduce) {
    if (given.op < HERRING_SUM || given.op > HERRING_BXOR) {
      throw Error(Code::kInvalidArgument, "op is " + std::to_string(given.op) + "; it must be a value of herring_op");
    }
    descriptor.reduce = static_cast<ReduceOp>(given.op);
  }
  descriptor.root = given.root;
  if (given.dims > kMaxDims) {
    throw Error(Code::kInvalidArgument,
                "dims is " + std::to_string(given.dims) + "; at most " + std::to_string(kMaxDims));
  }
  descriptor.dims = static_cast<std::uint8_t>(given.dims);
  std::uint64_t bytes = element_bytes(descriptor.dtype);
  if (given.dims > 0) require(given.shape, "shape");
  for (std::uint32_t dim = 0; dim < given.dims; ++dim) {
    descriptor.shape[dim] = given.shape[dim];
    if (__builtin_mul_overflow(bytes, given.shape[dim], &bytes)) {
      throw Error(Code::kInvalidArgument, "the shape is too large: its bytes do not fit in 64 bits");
    }
  }
  descriptor.op_bytes = bytes;
  if (bytes > 0) require(given.output, "output");
  // A group that is smaller than the job says so itself: its size is the runtime's business.
  const std::uint64_t blocks = descriptor.collective == Collective::kAllGather ? job.group_size(given.group) : 1;
  request.output = {static_cast<std::byte*>(given.output), bytes * blocks};
  request.input = given.input == nullptr ? std::span<const std::byte>(request.output)
                                         : std::span(static_cast<const std::byte*>(given.input), bytes);
  return request;
}

herring_code finish(std::shared_ptr<runtime::Work> started, herring_work** work) {
  *work = new herring_work{std::move(started)};
  return HERRING_OK;
}

}  // namespace

std::uint32_t herring_job::group_size(std::uint32_t group) const {
  const std::scoped_lock lock(mutex);
  const auto found = groups.find(group);
  return found == groups.end() ? runtime->size() : found->second;
}

extern "C" {

uint32_t herring_api_version(void) { return HERRING_API_VERSION; }

const char* herring_last_error(void) { return last_error.c_str(); }

herring_code herring_join(const herring_join_options* options, herring_job** job) {
  return guarded([&] {
    require(job, "job");
    *job = nullptr;
    *job = join(read(options, "options")).release();
    return HERRING_OK;
  });
}

void herring_leave(herring_job* job) {
  if (job == nullptr) return;
  static_cast<void>(guarded([&] {
    job->operations->close(std::chrono::steady_clock::now() + kLongestClose);
    job->runtime->shutdown();
    if (job->client) job->client->leave();
    return HERRING_OK;
  }));
  delete job;
}

void herring_abort(herring_job* job, const char* reason) {
  static_cast<void>(guarded([&] {
    require(job, "job");
    job->runtime->abort(reason == nullptr ? "no reason given" : reason);
    return HERRING_OK;
  }));
}

uint32_t herring_rank(const herring_job* job) { return job->runtime->rank(); }
uint32_t herring_size(const herring_job* job) { return job->runtime->size(); }
uint32_t herring_local_rank(const herring_job* job) { return job->runtime->local_rank(); }
uint32_t herring_local_size(const herring_job* job) { return job->runtime->local_size(); }

herring_code herring_add_group(herring_job* job, uint32_t group, const uint32_t* ranks, size_t count) {
  return guarded([&] {
    require(job, "job");
    require(ranks, "ranks");
    if (group == 0 || group >= kFirstGroupOfOthers) {
      throw Error(Code::kInvalidArgument, "group is " + std::to_string(group) + "; it must be from 1 to " +
                                              std::to_string(kFirstGroupOfOthers - 1));
    }
    job->runtime->add_group(GroupId{group}, {ranks, count});
    job->operations->open(GroupId{group}, {ranks, count});
    const std::scoped_lock lock(job->mutex);
    job->groups[group] = static_cast<std::uint32_t>(count);
    return HERRING_OK;
  });
}

herring_code herring_remove_group(herring_job* job, uint32_t group) {
  return guarded([&] {
    require(job, "job");
    job->operations->close(GroupId{group}, std::chrono::steady_clock::now() + kLongestClose);
    job->runtime->remove_group(GroupId{group});
    const std::scoped_lock lock(job->mutex);
    job->groups.erase(group);
    return HERRING_OK;
  });
}

herring_code herring_submit(herring_job* job, const herring_request* request, herring_work** work) {
  return guarded([&] {
    require(job, "job");
    require(work, "work");
    *work = nullptr;
    const herring_request given = read(request, "request");
    const runtime::Request made = request_of(*job, given);
    const bool is_alone = (given.flags & HERRING_ALONE) != 0;
    return finish(is_alone ? job->operations->submit_alone(made) : job->operations->submit(made), work);
  });
}

herring_code herring_wait(herring_work* work, double timeout_s) {
  return guarded([&] {
    require(work, "work");
    if (!work->work->wait(in(timeout_s))) return failed(Code::kAgain, "the operation has not ended yet");
    const Status status = work->work->status();
    return status.is_ok() ? HERRING_OK : failed(status);
  });
}

herring_code herring_on_done(herring_work* work, void (*callback)(void* context, herring_code code, const char* text),
                             void* context) {
  return guarded([&] {
    require(work, "work");
    work->work->on_done([callback, context](const Status& status) {
      callback(context, static_cast<herring_code>(status.code()), status.is_ok() ? "" : status.message().c_str());
    });
    return HERRING_OK;
  });
}

void herring_release(herring_work* work) { delete work; }

herring_code herring_send(herring_job* job, uint32_t group, uint32_t to, uint64_t tag, const void* data, size_t bytes,
                          herring_work** work) {
  return guarded([&] {
    require(job, "job");
    require(work, "work");
    *work = nullptr;
    runtime::Send message;
    message.group = GroupId{group};
    message.to = to;
    message.tag = tag;
    message.data = {static_cast<const std::byte*>(data), bytes};
    return finish(job->runtime->send(message), work);
  });
}

herring_code herring_receive(herring_job* job, uint32_t group, uint32_t from, uint64_t tag, void* memory, size_t bytes,
                             herring_work** work) {
  return guarded([&] {
    require(job, "job");
    require(work, "work");
    *work = nullptr;
    runtime::Receive message;
    message.group = GroupId{group};
    message.from = from;
    message.tag = tag;
    message.memory = {static_cast<std::byte*>(memory), bytes};
    return finish(job->runtime->receive(message), work);
  });
}

herring_code herring_allocate(herring_job* job, size_t bytes, herring_memory** memory) {
  return guarded([&] {
    require(job, "job");
    require(memory, "memory");
    *memory = nullptr;
    std::shared_ptr<std::byte> found = job->runtime->allocate(bytes);
    if (!found)
      return failed(Code::kUnavailable,
                    "no room left in HERRING_ARENA_BYTES; raise it, or use ordinary memory, which is copied");
    *memory = new herring_memory{std::move(found)};
    return HERRING_OK;
  });
}

herring_code herring_allocate_named(herring_job* job, uint32_t group, size_t count, const char* const* names,
                                    const size_t* bytes, herring_memory** memory, void** places) {
  return guarded([&] {
    require(job, "job");
    require(memory, "memory");
    *memory = nullptr;
    std::vector<collectives::NamedBytes> tensors;
    for (std::size_t i = 0; i < count; ++i) {
      require(names, "names");
      require(bytes, "bytes");
      require(places, "places");
      require(names[i], "a name");
      tensors.push_back({names[i], bytes[i]});
    }
    const collectives::TensorRow row = job->operations->place(GroupId{group}, tensors);
    for (std::size_t i = 0; i < count; ++i) places[i] = row.memory.get() + row.offsets[i];
    *memory = new herring_memory{row.memory};
    return HERRING_OK;
  });
}

void* herring_data(const herring_memory* memory) { return memory == nullptr ? nullptr : memory->bytes.get(); }

void herring_free(herring_memory* memory) { delete memory; }

}  // extern "C"
