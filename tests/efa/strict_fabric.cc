// A libfabric whose cards read and write a device's memory (FI_HMEM, FI_MR_HMEM) where there is none: a real libfabric
// behind it, whose tcp does the work, and what a strict card demands in front. It is asked for by its path, as any
// libfabric is. What it forgives nobody is written down (strict_fabric_fault()) and refused:
// - a span that no registration covers, or one of another interface than its memory's;
// - a message that has host memory and a device's, in one: EFA and verbs look at the first span to know what all are;
// - memory of a device on an endpoint that was not told to do without CUDA and without the host;
// - a device's registration that ends while a message uses it;
// - a post of a device's memory that a receive which was given up may still write to (strict_fabric_hold()).
//
// STRICT_FABRIC_LIBRARY: the real one. STRICT_FABRIC_LACKS: "hmem" (FI_HMEM is not offered), "p2p" (the card does not
// reach a device), "register" (memory of a device is not registered), "options" (they have no such option), "cancel"
// (a receive to a device's memory is never given back, as long as the endpoint lives).
#include <dlfcn.h>
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

namespace {

constexpr int kCudaApiPermitted = 10;  // libfabric 1.18.

using Reach = void* (*)(std::uint64_t address, std::uint64_t bytes);

struct Real {
  Real() {
    const char* const path = std::getenv("STRICT_FABRIC_LIBRARY");
    void* const library = dlopen(path == nullptr ? "libfabric.so.1" : path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == nullptr) return;
    const auto find = [library](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
    };
    find(version, "fi_version");
    find(get_info, "fi_getinfo");
    find(free_info, "fi_freeinfo");
    find(duplicate, "fi_dupinfo");
    find(fabric, "fi_fabric");
    find(error_text, "fi_strerror");
  }
  std::uint32_t (*version)() = nullptr;
  int (*get_info)(std::uint32_t, const char*, const char*, std::uint64_t, const fi_info*, fi_info**) = nullptr;
  void (*free_info)(fi_info*) = nullptr;
  fi_info* (*duplicate)(const fi_info*) = nullptr;
  int (*fabric)(fi_fabric_attr*, fid_fabric**, void*) = nullptr;
  const char* (*error_text)(int) = nullptr;
};

struct Region {
  fid_mr mr{};
  fi_ops ops{};
  fi_hmem_iface iface = FI_HMEM_SYSTEM;
  std::uint64_t begin = 0;
  std::uint64_t end = 0;
};

/// A libfabric object whose calls go through here first, and what they were.
template <class Ops>
struct Table {
  explicit Table(const Ops* real) : original(real), bytes(std::max(real->size, sizeof(Ops))) {
    std::memcpy(bytes.data(), real, real->size);
  }
  Ops* ops() { return reinterpret_cast<Ops*>(bytes.data()); }
  const Ops* original;
  std::vector<unsigned char> bytes;  // A newer library's table is longer.
};

struct Endpoint {
  std::unique_ptr<Table<fi_ops>> fid;
  std::unique_ptr<Table<fi_ops_ep>> ep;
  std::unique_ptr<Table<fi_ops_msg>> msg;
  std::unique_ptr<Table<fi_ops_tagged>> tagged;
  bool may_copy = true;
  bool may_call_cuda = true;
};

struct Use {
  fid_ep* endpoint = nullptr;
  std::uint64_t bytes = 0;
  std::vector<const Region*> regions;
  std::vector<iovec> spans = {};  // Of the device.
  bool is_receive = false;
  bool is_held = false;  // Nobody else may use its memory.
};

struct World {
  std::recursive_mutex mutex;  // guards all below
  Real real;
  Reach reach = nullptr;
  std::string fault;
  std::uint64_t device_bytes = 0;
  std::map<fid_fabric*, std::unique_ptr<Table<fi_ops_fabric>>> fabrics;
  std::map<fid_domain*, std::unique_ptr<Table<fi_ops_domain>>> domains;
  std::map<fid_domain*, std::unique_ptr<Table<fi_ops_mr>>> memory;
  std::map<fid_cq*, std::unique_ptr<Table<fi_ops_cq>>> queues;
  std::map<fid_ep*, Endpoint> endpoints;
  std::map<void*, Use> uses;  // By the post's context.
  bool has_held = false;      // Some of them.
};

World& world() {
  static auto* const one = new World();
  return *one;
}
#define LOCKED const std::lock_guard lock(world().mutex)

bool lacks(std::string_view what) {
  const char* const text = std::getenv("STRICT_FABRIC_LACKS");
  return text != nullptr && what == text;
}

int fault(const std::string& what) {
  if (world().fault.empty()) world().fault = what;
  return -FI_EINVAL;
}

void* reached(std::uint64_t address, std::uint64_t bytes) {
  return world().reach == nullptr ? nullptr : world().reach(address, bytes);
}

/// What the real library is told: nothing of devices.
fi_info* plain(const fi_info* info) {
  fi_info* const copy = world().real.duplicate(info);
  copy->caps &= ~FI_HMEM;
  if (copy->domain_attr != nullptr) copy->domain_attr->mr_mode &= ~FI_MR_HMEM;
  return copy;
}
fi_info* without_registration(const fi_info* info) {
  fi_info* const copy = plain(info);
  copy->domain_attr->mr_mode &= ~FI_MR_LOCAL;
  return copy;
}

// -- memory

int close_region(fid* object) {
  LOCKED;
  auto* const region = reinterpret_cast<Region*>(object);
  for (const auto& [context, use] : world().uses) {
    const bool is_used = std::find(use.regions.begin(), use.regions.end(), region) != use.regions.end();
    if (is_used && region->iface != FI_HMEM_SYSTEM) fault("a device's registration ended while a message used it");
  }
  delete region;
  return 0;
}

int add_region(const iovec& span, fi_hmem_iface iface, fid_mr** made) {
  LOCKED;
  const auto begin = reinterpret_cast<std::uint64_t>(span.iov_base);
  const bool is_on_device = reached(begin, span.iov_len) != nullptr;
  if (is_on_device != (iface == FI_HMEM_CUDA))
    return fault("memory was registered with another interface than its own");
  if (is_on_device && lacks("register")) return -FI_ENOMEM;
  auto* const region = new Region();
  region->iface = iface;
  region->begin = begin;
  region->end = begin + span.iov_len;
  region->ops.size = sizeof(fi_ops);
  region->ops.close = &close_region;
  region->mr.fid.fclass = FI_CLASS_MR;
  region->mr.fid.ops = &region->ops;
  region->mr.mem_desc = region;
  *made = &region->mr;
  return 0;
}

int register_host(fid*, const void* memory, std::size_t bytes, std::uint64_t, std::uint64_t, std::uint64_t,
                  std::uint64_t, fid_mr** made, void*) {
  return add_region({const_cast<void*>(memory), bytes}, FI_HMEM_SYSTEM, made);
}

int register_any(fid*, const fi_mr_attr* attr, std::uint64_t flags, fid_mr** made) {
  if (attr->iov_count != 1 || flags != 0) return -FI_EINVAL;
  return add_region(attr->mr_iov[0], attr->iface, made);
}

// -- posts

struct Spans {
  std::array<iovec, 4> real{};
  Use use;
};

bool is_held(const iovec& span) {
  if (!world().has_held) return false;
  const auto begin = reinterpret_cast<std::uint64_t>(span.iov_base);
  return std::any_of(world().uses.begin(), world().uses.end(), [&](const auto& entry) {
    return entry.second.is_held &&
           std::any_of(entry.second.spans.begin(), entry.second.spans.end(), [&](const iovec& other) {
             const auto start = reinterpret_cast<std::uint64_t>(other.iov_base);
             return begin < start + other.iov_len && start < begin + span.iov_len;
           });
  });
}

int check(fid_ep* ep, const iovec* spans, void* const* descriptors, std::size_t count, Spans& checked) {
  const Endpoint& endpoint = world().endpoints.at(ep);
  checked.use.endpoint = ep;
  std::size_t on_device = 0;
  for (std::size_t i = 0; i < count; ++i) {
    const auto* const region = static_cast<const Region*>(descriptors == nullptr ? nullptr : descriptors[i]);
    const auto begin = reinterpret_cast<std::uint64_t>(spans[i].iov_base);
    if (region == nullptr) return fault("a post of memory without a registration");
    if (begin < region->begin || begin + spans[i].iov_len > region->end) return fault("a post beyond its registration");
    checked.real[i] = spans[i];
    if (region->iface == FI_HMEM_SYSTEM) continue;
    ++on_device;
    checked.real[i].iov_base = reached(begin, spans[i].iov_len);
    if (checked.real[i].iov_base == nullptr) return fault("a post of memory that the device does not have any more");
    checked.use.regions.push_back(region);
    checked.use.bytes += spans[i].iov_len;
    checked.use.spans.push_back(spans[i]);
    if (is_held(spans[i])) return fault("memory that a receive which was given up may still write to was used again");
  }
  if (on_device > 0 && on_device < count) return fault("host memory and a device's in one message");
  if (on_device > 0 && !lacks("options") && (endpoint.may_copy || endpoint.may_call_cuda)) {
    return fault("memory of a device, and the provider may copy it by way of the host, or call CUDA");
  }
  return 0;
}

template <class Message, class Call>
ssize_t post(fid_ep* ep, const Message* message, bool is_receive, const Call& call) {
  LOCKED;
  Spans spans;
  if (const int result = check(ep, message->msg_iov, message->desc, message->iov_count, spans)) return result;
  spans.use.is_receive = is_receive;
  Message real = *message;
  real.msg_iov = spans.real.data();
  real.desc = nullptr;
  const std::uint64_t bytes = spans.use.bytes;  // Of the device.
  const bool is_on_device = bytes > 0;
  if (is_on_device) world().uses[message->context] = std::move(spans.use);
  const ssize_t result = call(&real);
  if (result == 0) {
    world().device_bytes += bytes;
  } else if (is_on_device) {
    world().uses.erase(message->context);
  }
  return result;
}

ssize_t send_message(fid_ep* ep, const fi_msg* message, std::uint64_t flags) {
  return post(ep, message, false,
              [&](const fi_msg* real) { return world().endpoints.at(ep).msg->original->sendmsg(ep, real, flags); });
}
ssize_t receive_message(fid_ep* ep, const fi_msg* message, std::uint64_t flags) {
  return post(ep, message, true,
              [&](const fi_msg* real) { return world().endpoints.at(ep).msg->original->recvmsg(ep, real, flags); });
}
ssize_t send_tagged(fid_ep* ep, const fi_msg_tagged* message, std::uint64_t flags) {
  return post(ep, message, false, [&](const fi_msg_tagged* real) {
    return world().endpoints.at(ep).tagged->original->sendmsg(ep, real, flags);
  });
}
ssize_t receive_tagged(fid_ep* ep, const fi_msg_tagged* message, std::uint64_t flags) {
  return post(ep, message, true, [&](const fi_msg_tagged* real) {
    return world().endpoints.at(ep).tagged->original->recvmsg(ep, real, flags);
  });
}

ssize_t cancel(fid* object, void* context) {
  LOCKED;
  const auto use = world().uses.find(context);
  if (lacks("cancel") && use != world().uses.end() && use->second.is_receive) return 0;
  return world().endpoints.at(reinterpret_cast<fid_ep*>(object)).ep->original->cancel(object, context);
}

ssize_t read_queue(fid_cq* queue, void* buffer, std::size_t count) {
  LOCKED;
  const ssize_t found = world().queues.at(queue)->original->read(queue, buffer, count);
  const auto* const entries = static_cast<const fi_cq_tagged_entry*>(buffer);
  for (ssize_t i = 0; i < found; ++i) world().uses.erase(entries[i].op_context);
  return found;
}
ssize_t read_error(fid_cq* queue, fi_cq_err_entry* entry, std::uint64_t flags) {
  LOCKED;
  const ssize_t found = world().queues.at(queue)->original->readerr(queue, entry, flags);
  if (found > 0) world().uses.erase(entry->op_context);
  return found;
}

// -- objects

int set_option(fid* object, int level, int option, const void* value, std::size_t bytes) {
  LOCKED;
  auto* const ep = reinterpret_cast<fid_ep*>(object);
  Endpoint& endpoint = world().endpoints.at(ep);
  if (option != FI_OPT_FI_HMEM_P2P && option != kCudaApiPermitted) {
    return endpoint.ep->original->setopt(object, level, option, value, bytes);
  }
  if (lacks("options")) return -FI_ENOPROTOOPT;
  if (lacks("p2p")) return -FI_EOPNOTSUPP;
  if (option == FI_OPT_FI_HMEM_P2P) {
    if (bytes != sizeof(int)) return -FI_EINVAL;
    endpoint.may_copy = *static_cast<const int*>(value) != FI_HMEM_P2P_REQUIRED;
  } else {
    if (bytes != sizeof(bool)) return -FI_EINVAL;
    endpoint.may_call_cuda = *static_cast<const bool*>(value);
  }
  return 0;
}

int close_endpoint(fid* object) {
  LOCKED;
  auto* const ep = reinterpret_cast<fid_ep*>(object);
  std::erase_if(world().uses, [ep](const auto& entry) { return entry.second.endpoint == ep; });
  auto closing = world().endpoints.extract(ep);
  object->ops = const_cast<fi_ops*>(closing.mapped().fid->original);
  return object->ops->close(object);
}

int open_endpoint(fid_domain* domain, fi_info* info, fid_ep** opened, void* context) {
  LOCKED;
  fi_info* const real = without_registration(info);
  const int result = world().domains.at(domain)->original->endpoint(domain, real, opened, context);
  world().real.free_info(real);
  if (result != 0 || info->ep_attr->type != FI_EP_RDM) return result;  // The provider's own connections.
  fid_ep* const ep = *opened;
  Endpoint endpoint;
  endpoint.fid = std::make_unique<Table<fi_ops>>(ep->fid.ops);
  endpoint.fid->ops()->close = &close_endpoint;
  endpoint.ep = std::make_unique<Table<fi_ops_ep>>(ep->ops);
  endpoint.ep->ops()->setopt = &set_option;
  endpoint.ep->ops()->cancel = &cancel;
  endpoint.msg = std::make_unique<Table<fi_ops_msg>>(ep->msg);
  endpoint.msg->ops()->sendmsg = &send_message;
  endpoint.msg->ops()->recvmsg = &receive_message;
  endpoint.tagged = std::make_unique<Table<fi_ops_tagged>>(ep->tagged);
  endpoint.tagged->ops()->sendmsg = &send_tagged;
  endpoint.tagged->ops()->recvmsg = &receive_tagged;
  ep->fid.ops = endpoint.fid->ops();
  ep->ops = endpoint.ep->ops();
  ep->msg = endpoint.msg->ops();
  ep->tagged = endpoint.tagged->ops();
  world().endpoints[ep] = std::move(endpoint);
  return 0;
}

int open_queue(fid_domain* domain, fi_cq_attr* attr, fid_cq** opened, void* context) {
  LOCKED;
  const int result = world().domains.at(domain)->original->cq_open(domain, attr, opened, context);
  if (result != 0) return result;
  auto table = std::make_unique<Table<fi_ops_cq>>((*opened)->ops);
  table->ops()->read = &read_queue;
  table->ops()->readerr = &read_error;
  (*opened)->ops = table->ops();
  world().queues[*opened] = std::move(table);
  return 0;
}

int open_domain(fid_fabric* fabric, fi_info* info, fid_domain** opened, void* context) {
  LOCKED;
  const bool is_strict = (info->caps & FI_HMEM) != 0;
  fi_info* const real = is_strict ? without_registration(info) : world().real.duplicate(info);
  const int result = world().fabrics.at(fabric)->original->domain(fabric, real, opened, context);
  world().real.free_info(real);
  if (result != 0 || !is_strict) return result;
  auto domain = std::make_unique<Table<fi_ops_domain>>((*opened)->ops);
  domain->ops()->endpoint = &open_endpoint;
  domain->ops()->cq_open = &open_queue;
  auto memory = std::make_unique<Table<fi_ops_mr>>((*opened)->mr);
  memory->ops()->reg = &register_host;
  memory->ops()->regattr = &register_any;
  (*opened)->ops = domain->ops();
  (*opened)->mr = memory->ops();
  world().domains[*opened] = std::move(domain);
  world().memory[*opened] = std::move(memory);
  return 0;
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) std::uint32_t fi_version() { return world().real.version(); }
__attribute__((visibility("default"))) const char* fi_strerror(int code) { return world().real.error_text(code); }
__attribute__((visibility("default"))) void fi_freeinfo(fi_info* info) { world().real.free_info(info); }
__attribute__((visibility("default"))) fi_info* fi_dupinfo(const fi_info* info) { return world().real.duplicate(info); }

__attribute__((visibility("default"))) int fi_getinfo(std::uint32_t version, const char* node, const char* service,
                                                      std::uint64_t flags, const fi_info* hints, fi_info** found) {
  LOCKED;
  const bool is_asked = hints != nullptr && (hints->caps & FI_HMEM) != 0;
  if (!is_asked) return world().real.get_info(version, node, service, flags, hints, found);
  if (lacks("hmem") || (hints->domain_attr->mr_mode & FI_MR_HMEM) == 0) return -FI_ENODATA;
  fi_info* const real = plain(hints);
  const int result = world().real.get_info(version, node, service, flags, real, found);
  world().real.free_info(real);
  for (fi_info* info = result == 0 ? *found : nullptr; info != nullptr; info = info->next) {
    info->caps |= FI_HMEM;
    info->domain_attr->mr_mode |= FI_MR_LOCAL | FI_MR_HMEM;
  }
  return result;
}

__attribute__((visibility("default"))) int fi_fabric(fi_fabric_attr* attr, fid_fabric** opened, void* context) {
  LOCKED;
  const int result = world().real.fabric(attr, opened, context);
  if (result != 0) return result;
  auto table = std::make_unique<Table<fi_ops_fabric>>((*opened)->ops);
  table->ops()->domain = &open_domain;
  (*opened)->ops = table->ops();
  world().fabrics[*opened] = std::move(table);
  return 0;
}

/// Where the device's memory is for the host; null of what is none.
__attribute__((visibility("default"))) void strict_fabric_reach(Reach reach) {
  LOCKED;
  world().reach = reach;
}
/// The first thing that was not forgiven; empty: there was none.
__attribute__((visibility("default"))) const char* strict_fabric_fault() {
  LOCKED;
  return world().fault.c_str();
}
__attribute__((visibility("default"))) void strict_fabric_forget() {
  LOCKED;
  world().fault.clear();
  world().device_bytes = 0;
}
/// Bytes of a device's memory that were posted so far.
__attribute__((visibility("default"))) std::uint64_t strict_fabric_device_bytes() {
  LOCKED;
  return world().device_bytes;
}
/// Receives to a device's memory that have not ended.
__attribute__((visibility("default"))) std::uint64_t strict_fabric_receives() {
  LOCKED;
  const auto& uses = world().uses;
  return std::count_if(uses.begin(), uses.end(), [](const auto& entry) { return entry.second.is_receive; });
}
/// Nobody may use the memory of those from now on; how many they are.
__attribute__((visibility("default"))) std::uint64_t strict_fabric_hold() {
  LOCKED;
  world().has_held = true;
  for (auto& [context, use] : world().uses) use.is_held = use.is_receive;
  return strict_fabric_receives();
}
/// Posts of a device's memory that have not ended.
__attribute__((visibility("default"))) std::uint64_t strict_fabric_uses() {
  LOCKED;
  return world().uses.size();
}
}
