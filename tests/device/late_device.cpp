// A simulated accelerator for PyTorch's PrivateUse1, as hostile as the rules of streams allow.
//
// - Queued work never runs in the call that queues it. When work is queued, polled or waited for, a seeded scheduler runs
//   the first operations of the streams' queues, one at a time, in any order that events allow. A seed repeats a schedule.
// - The host faults when it touches device memory.
// - Memory is overwritten when a caching allocator could give it to another owner: new, freed, and freed pinned memory.
// - Every access is checked against the happens-before order; two conflicting accesses without an order are a race, even
//   if this schedule ran them in the right order.
//
// Not modelled: kernels that run at the same time, peer copies, graphs (only their capture flag), and timing (a step of
// the scheduler is a millisecond).
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/index_copy.h>
#include <ATen/ops/index_select.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <sys/mman.h>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>

namespace late {
using Clock = std::map<int, int64_t>;  // stream -> number of its operations that happened before; -1 is the host
constexpr int kDevices = 2;

void join(Clock& into, const Clock& other) {
  for (auto& [k, v] : other) { auto& mine = into[k]; mine = std::max(mine, v); }
}

struct Stream;
struct Mark {  // one recording of an event
  bool done = false;
  int64_t tick = 0;
  Stream* stream = nullptr;
  Clock clock;
};
using MarkPtr = std::shared_ptr<Mark>;
struct Event { MarkPtr last; bool timing = false; };
struct Op {
  std::string name;
  std::function<void()> run;
  MarkPtr waits, records;
  int64_t left = 0;  // steps left to sleep
  Clock clock;       // the operations that happen before it
  int64_t index = 0;
};
struct Stream {
  int id = 0, device = 0;
  double weight = 1;
  std::deque<Op> queue;
  int64_t count = 0;
  Clock clock;
  bool capturing = false;
};
struct Block { char* shadow; size_t size; Stream* stream; std::set<Stream*> used; bool freed; };
struct Pinned { size_t size; std::set<Stream*> used; bool freed, registered; };
struct Access { const char* first; const char* last; bool write; int stream; int64_t index; std::string name; };

std::recursive_mutex g_lock;
std::deque<Stream> g_streams;                       // indexed by stream id
std::vector<int> g_default;                         // per device
std::map<const char*, Block> g_blocks;              // by the address in tensors, which the host cannot touch
std::map<const char*, Pinned> g_pinned;
std::vector<std::pair<const char*, std::vector<MarkPtr>>> g_pinned_ends;
std::vector<Access> g_accesses;
std::vector<std::string> g_races;
Clock g_host;
int64_t g_tick = 0, g_host_count = 0, g_syncs = 0;
std::mt19937 g_random{1};
double g_eager = 0.3;
int64_t g_capacity = int64_t(1) << 30;
int64_t g_used = 0;
const Op* g_op = nullptr;  // the running operation
int g_op_stream = 0;
thread_local int t_device = 0;
thread_local std::map<int, int> t_current;

Stream* stream_of(c10::Stream s) { return &g_streams.at(s.id()); }
double random_weight() {
  static const double weights[] = {0, 0.05, 1, 1, 20};
  return weights[g_random() % 5];
}
int new_stream(int device) {
  g_streams.emplace_back();
  auto& s = g_streams.back();
  s.id = int(g_streams.size()) - 1;
  s.device = device;
  s.weight = random_weight();
  s.clock = g_host;
  return s.id;
}
int default_stream(int device) {
  while (int(g_default.size()) <= device) g_default.push_back(new_stream(int(g_default.size())));
  return g_default[device];
}
Stream* current(int device) {
  auto found = t_current.find(device);
  return &g_streams.at(found == t_current.end() ? default_stream(device) : found->second);
}

// --- the scheduler ------------------------------------------------------------------------------------------------
void settle_pinned();
bool step(Stream* s) {
  if (s->queue.empty()) return false;
  auto& op = s->queue.front();
  if (op.waits && !op.waits->done) return false;
  ++g_tick;
  if (op.left > 0 && --op.left > 0) return true;
  Op mine = std::move(op);
  s->queue.pop_front();
  g_op = &mine;
  g_op_stream = s->id;
  if (mine.run) mine.run();
  g_op = nullptr;
  if (mine.records) { mine.records->done = true; mine.records->tick = g_tick; }
  return true;
}
void wander() {  // run a random number of steps of random streams
  std::uniform_real_distribution<double> chance(0, 1);
  for (int i = 0; i < 64 && chance(g_random) < g_eager; ++i) {
    double sum = 0;
    for (auto& s : g_streams) if (!s.queue.empty()) sum += s.weight;
    if (sum <= 0) break;
    double at = chance(g_random) * sum;
    for (auto& s : g_streams) {
      if (s.queue.empty()) continue;
      at -= s.weight;
      if (at <= 0) { step(&s); break; }
    }
  }
  settle_pinned();
}
void force(const MarkPtr& mark, int depth = 0) {
  TORCH_CHECK(depth < 64, "late: streams wait for each other");
  while (!mark->done) {
    auto* s = mark->stream;
    TORCH_CHECK(!s->queue.empty(), "late: an event that was never queued");
    if (auto waits = s->queue.front().waits; waits && !waits->done) force(waits, depth + 1);
    else step(s);
    wander();
  }
}
void enqueue(Stream* s, Op op) {
  join(s->clock, g_host);
  if (op.waits) join(s->clock, op.waits->clock);
  s->clock[s->id] = ++s->count;
  op.clock = s->clock;
  op.index = s->count;
  if (op.records) { op.records->clock = s->clock; op.records->stream = s; }
  s->queue.push_back(std::move(op));
  wander();
}
MarkPtr record(Stream* s) {
  auto mark = std::make_shared<Mark>();
  enqueue(s, Op{"record", nullptr, nullptr, mark});
  return mark;
}
void host_sync(const MarkPtr& mark) {
  TORCH_CHECK(!mark->stream->capturing, "late: operation not permitted when stream is capturing");
  ++g_syncs;
  force(mark);
  join(g_host, mark->clock);
  settle_pinned();
}
void sync_stream(Stream* s) { host_sync(record(s)); }

// --- memory ---------------------------------------------------------------------------------------------------------
Block* block_of(const void* address, const char** base = nullptr) {
  auto it = g_blocks.upper_bound(static_cast<const char*>(address));
  if (it == g_blocks.begin()) return nullptr;
  --it;
  if (static_cast<const char*>(address) >= it->first + it->second.size) return nullptr;
  if (base) *base = it->first;
  return &it->second;
}
char* shadow(const void* address) {
  const char* base = nullptr;
  auto* block = block_of(address, &base);
  TORCH_CHECK(block, "late: not device memory");
  return block->shadow + (static_cast<const char*>(address) - base);
}
// Record an access of the running operation or the host, and a race with every unordered, conflicting one.
void touch(const void* first, size_t size, bool write, const std::string& name) {
  if (size == 0) return;
  auto* low = static_cast<const char*>(first);
  auto* high = low + size;
  int id = g_op ? g_op_stream : -1;
  if (!g_op) g_host[-1] = ++g_host_count;
  const Clock& clock = g_op ? g_op->clock : g_host;
  int64_t index = g_op ? g_op->index : g_host_count;
  size_t kept = 0;
  for (size_t i = 0; i < g_accesses.size(); ++i) {
    auto& a = g_accesses[i];
    bool overlaps = a.first < high && low < a.last, before = a.stream == id;
    if (auto it = clock.find(a.stream); it != clock.end() && it->second >= a.index) before = true;
    if (overlaps && (a.write || write) && !before)
      g_races.push_back(name + " of stream " + std::to_string(id) + " is not ordered after " + a.name +
                        " of stream " + std::to_string(a.stream));
    // A later write that covers an ordered access makes that one redundant.
    if (!(write && before && low <= a.first && a.last <= high)) {
      if (kept != i) g_accesses[kept] = std::move(a);
      ++kept;
    }
  }
  g_accesses.resize(kept);
  g_accesses.push_back({low, high, write, id, index, name});
}
void* allocate(size_t size) {
  g_used += size;
  if (g_used > g_capacity) {
    g_used -= size;
    TORCH_CHECK_WITH(OutOfMemoryError, false, "late: out of device memory");
  }
  size_t whole = (size + 4095) / 4096 * 4096;
  int fd = memfd_create("late", 0);
  TORCH_CHECK(fd >= 0 && ftruncate(fd, whole) == 0, "late: no memory");
  auto* seen = static_cast<char*>(mmap(nullptr, whole, PROT_NONE, MAP_SHARED, fd, 0));
  auto* real = static_cast<char*>(mmap(nullptr, whole, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0));
  close(fd);
  TORCH_CHECK(seen != MAP_FAILED && real != MAP_FAILED, "late: no memory");
  auto* s = current(t_device);
  g_blocks[seen] = Block{real, whole, s, {}, false};
  // The last owner of the block may still write to it in this stream.
  enqueue(s, Op{"scribble by the last owner", [real, whole, seen] {
    memset(real, 0xA5, whole);
    touch(seen, whole, true, "the block's last owner");
  }});
  return seen;
}
void release(void* address) {
  if (!address) return;
  std::lock_guard<std::recursive_mutex> hold(g_lock);
  auto it = g_blocks.find(static_cast<char*>(address));
  if (it == g_blocks.end() || it->second.freed) return;
  auto& b = it->second;
  b.freed = true;
  g_used -= b.size;
  for (auto* used : b.used)
    if (used != b.stream) { auto mark = record(used); enqueue(b.stream, Op{"wait", nullptr, mark}); }
  // From here on, the next owner may write to it in the stream for which the block was allocated.
  enqueue(b.stream, Op{"scribble by the next owner", [r = b.shadow, n = b.size, address] {
    memset(r, 0xDB, n);
    touch(address, n, true, "the block's next owner");
  }});
}
std::map<const char*, Pinned>::iterator pinned_of(const void* address) {
  auto it = g_pinned.upper_bound(static_cast<const char*>(address));
  if (it == g_pinned.begin()) return g_pinned.end();
  --it;
  return static_cast<const char*>(address) < it->first + it->second.size && !it->second.freed ? it : g_pinned.end();
}
bool is_pinned(const void* address, size_t size) {
  auto it = pinned_of(address);
  if (it == g_pinned.end()) return false;
  TORCH_CHECK(static_cast<const char*>(address) + size <= it->first + it->second.size,
              "late: invalid argument: a copy reaches over what was pinned at once");
  return true;
}
void settle_pinned() {
  for (size_t i = 0; i < g_pinned_ends.size();) {
    bool done = true;
    for (auto& mark : g_pinned_ends[i].second) done &= mark->done;
    if (done) {
      auto& p = g_pinned[g_pinned_ends[i].first];
      memset(const_cast<char*>(g_pinned_ends[i].first), 0xEE, p.size);
      g_pinned_ends.erase(g_pinned_ends.begin() + i);
    } else ++i;
  }
}
void release_pinned(void* address) {
  if (!address) return;
  std::lock_guard<std::recursive_mutex> hold(g_lock);
  auto it = g_pinned.find(static_cast<char*>(address));
  if (it == g_pinned.end()) return;
  it->second.freed = true;
  std::vector<MarkPtr> ends;
  for (auto* s : it->second.used) ends.push_back(record(s));
  g_pinned_ends.emplace_back(it->first, ends);
  settle_pinned();
}
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    void* p = n ? late::allocate(n) : nullptr;
    return {p, p, &release, c10::Device(c10::kPrivateUse1, t_device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override { memcpy(shadow(to), shadow(from), n); }
};
DeviceAllocator g_device_allocator;
REGISTER_ALLOCATOR(c10::kPrivateUse1, &g_device_allocator);

struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t n) override {
    std::lock_guard<std::recursive_mutex> hold(g_lock);
    void* p = nullptr;
    if (n) {
      size_t whole = (n + 4095) / 4096 * 4096;
      TORCH_CHECK(posix_memalign(&p, 4096, whole) == 0, "late: no host memory");
      memset(p, 0x5A, whole);
      g_pinned[static_cast<char*>(p)] = Pinned{whole, {}, false, false};
    }
    return {p, p, &release_pinned, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release_pinned; }
  void copy_data(void* to, const void* from, size_t n) const final { memcpy(to, from, n); }
  bool record_event(void* p, void*, c10::Stream s) override {
    auto it = pinned_of(p);
    if (it == g_pinned.end()) return false;
    it->second.used.insert(stream_of(s));
    return true;
  }
  void empty_cache(c10::MempoolId_t = {0, 0}) {}
  void empty_cache() {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostAllocator g_host_allocator;
REGISTER_HOST_ALLOCATOR(at::kPrivateUse1, &g_host_allocator);

// --- PyTorch's interfaces -------------------------------------------------------------------------------------------
struct Guard final : c10::impl::DeviceGuardImplInterface {
  using S = c10::Stream;
  static S wrap(const Stream* s) {
    return S(S::UNSAFE, c10::Device(c10::kPrivateUse1, s->device), s->id);
  }
  c10::DeviceType type() const override { return c10::kPrivateUse1; }
  c10::Device getDevice() const override { return c10::Device(c10::kPrivateUse1, t_device); }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    uncheckedSetDevice(d);
    return old;
  }
  void setDevice(c10::Device d) const override { uncheckedSetDevice(d); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.index() >= 0) t_device = d.index(); }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }
  int index(c10::Device d) const { return d.index() < 0 ? t_device : d.index(); }
  S getStream(c10::Device d) const override { std::lock_guard<std::recursive_mutex> h(g_lock); return wrap(current(index(d))); }
  S getDefaultStream(c10::Device d) const override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    return wrap(&g_streams.at(default_stream(index(d))));
  }
  S getNewStream(c10::Device d, int = 0) const override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    default_stream(kDevices - 1);
    return wrap(&g_streams.at(new_stream(index(d))));
  }
  S getStreamFromGlobalPool(c10::Device d, bool = false) const override { return getNewStream(d); }
  S exchangeStream(S s) const override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    auto old = wrap(current(s.device_index()));
    t_current[s.device_index()] = int(s.id());
    return old;
  }
  void destroyEvent(void* e, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(e); }
  void record(void** e, const S& s, const c10::DeviceIndex d, const c10::EventFlag flag) const override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    TORCH_CHECK(d == -1 || d == s.device_index(), "late: an event of another device");
    if (!*e) *e = new Event{nullptr, flag == c10::EventFlag::BACKEND_DEFAULT};
    static_cast<Event*>(*e)->last = late::record(stream_of(s));
  }
  void block(void* e, const S& s) const override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    if (e && static_cast<Event*>(e)->last) enqueue(stream_of(s), Op{"wait", nullptr, static_cast<Event*>(e)->last});
  }
  bool queryEvent(void* e) const override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    if (!e || !static_cast<Event*>(e)->last) return true;
    for (auto& s : g_streams) TORCH_CHECK(!s.capturing, "late: operation not permitted when stream is capturing");
    wander();
    auto& mark = static_cast<Event*>(e)->last;
    // Polling ends some time, even for a stream that the scheduler hardly runs.
    if (!mark->done && g_random() % 4 == 0) {
      auto* s = mark->stream;
      while (s->queue.front().waits && !s->queue.front().waits->done) s = s->queue.front().waits->stream;
      step(s);
    }
    if (mark->done) join(g_host, mark->clock);
    return mark->done;
  }
  void synchronizeEvent(void* e) const override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    if (e && static_cast<Event*>(e)->last) host_sync(static_cast<Event*>(e)->last);
  }
  bool queryStream(const S& s) const override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    wander();
    return stream_of(s)->queue.empty();
  }
  void synchronizeStream(const S& s) const override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    sync_stream(stream_of(s));
  }
  void synchronizeDevice(const c10::DeviceIndex d) const override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    for (size_t i = 0; i < g_streams.size(); ++i)
      if (g_streams[i].device == (d < 0 ? t_device : d)) sync_stream(&g_streams[i]);
  }
  bool isStreamCapturing(const S& s) const override { return stream_of(s)->capturing; }
  void recordDataPtrOnStream(const c10::DataPtr& p, const S& s) const override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    if (auto* b = block_of(p.get())) b->used.insert(stream_of(s));
  }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    auto *from = static_cast<Event*>(a), *to = static_cast<Event*>(b);
    TORCH_CHECK(from && to && from->timing && to->timing, "late: both events must be recorded, with timing");
    TORCH_CHECK(from->last->done && to->last->done, "late: both events must be done");
    return double(to->last->tick - from->last->tick);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(c10::DeviceIndex d) const override { t_device = d; }
  c10::DeviceIndex getCurrentDevice() const override { return t_device; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { auto old = t_device; t_device = d; return old; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return d < 0 ? t_device : exchangeDevice(d); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &g_host_allocator; }
  bool isPinnedPtr(const void* p) const override {
    std::lock_guard<std::recursive_mutex> h(g_lock);
    return pinned_of(p) != g_pinned.end();
  }
  at::Device getDeviceFromPtr(void*) const override { return at::Device(c10::kPrivateUse1, t_device); }
};
static bool hooked = [] { at::RegisterPrivateUse1HooksInterface(new Hooks()); return true; }();

// --- operators ------------------------------------------------------------------------------------------------------
// A tensor as queued work sees it: an address, without a reference to the memory.
struct Raw {
  char* at; c10::DimVector sizes, strides; c10::ScalarType type; const char* low; size_t span;
  explicit Raw(const at::Tensor& t) : sizes(t.sizes()), strides(t.strides()), type(t.scalar_type()) {
    low = static_cast<const char*>(t.const_data_ptr());
    int64_t last = 0;
    for (int64_t i = 0; i < t.dim(); ++i) last += (t.size(i) - 1) * t.stride(i);
    span = t.numel() ? size_t(last + 1) * t.element_size() : 0;
    at = t.is_cpu() || !t.numel() ? const_cast<char*>(low) : shadow(low);
  }
  at::Tensor cpu() const { return at::from_blob(at, sizes, strides, at::TensorOptions().dtype(type)); }
  // By rows: layers are adjacent in the staging buffer, and a gather reads only its rows.
  void touched(bool write, const char* name) const {
    if (!span) return;
    if (sizes.size() == 2 && strides[1] == 1 && strides[0] > sizes[1])
      for (int64_t r = 0; r < sizes[0]; ++r) row(r, write, name);
    else touch(low, span, write, name);
  }
  void row(int64_t r, bool write, const char* name) const {
    size_t width = c10::elementSize(type);
    if (r >= 0 && r < sizes[0]) touch(low + size_t(r * strides[0]) * width, size_t(sizes[1]) * width, write, name);
  }
  void rows(const at::Tensor& ids, bool write, const char* name) const {
    auto* id = ids.const_data_ptr<int64_t>();
    for (int64_t k = 0; k < ids.numel(); ++k) row(id[k], write, name);
  }
};
void queue(const at::Tensor& where, const char* name, std::function<void()> work) {
  enqueue(current(where.device().index()), Op{name, [work = std::move(work)] {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_modes(c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot}));
    work();
  }});
}
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  std::lock_guard<std::recursive_mutex> hold(g_lock);
  if (!to.numel()) return to;
  const auto& device = from.is_cpu() ? to : from;
  const auto& host = from.is_cpu() ? from : to;
  TORCH_CHECK(from.is_cpu() || to.is_cpu() || from.device() == to.device(), "late: no peer copies");
  auto* s = current(device.device().index());
  Raw source(from), target(to);
  bool crosses = from.is_cpu() || to.is_cpu();
  bool pinned = crosses && is_pinned(host.const_data_ptr(), Raw(host).span);
  if (crosses && pinned && non_blocking) g_host_allocator.record_event(host.mutable_data_ptr(), nullptr, Guard::wrap(s));
  if (crosses && from.is_cpu() && !(pinned && non_blocking)) {
    // Pageable memory is read before the call returns.
    auto now = source.cpu().clone();
    queue(device, "copy from pageable memory", [now, target] {
      target.touched(true, "copy from pageable memory");
      target.cpu().copy_(now);
    });
    if (!non_blocking) sync_stream(s);
  } else {
    const char* name = crosses ? (to.is_cpu() ? "copy to host" : "copy from host") : "copy";
    queue(device, name, [source, target, name] {
      source.touched(false, name);
      target.touched(true, name);
      target.cpu().copy_(source.cpu());
    });
    if (crosses && !(pinned && non_blocking)) sync_stream(s);
  }
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  at::native::resize_(to, from.sizes(), std::nullopt);
  return const_cast<at::Tensor&>(to).copy_(from);
}
at::Tensor& index_select_out(const at::Tensor& self, int64_t dim, const at::Tensor& index, at::Tensor& out) {
  std::lock_guard<std::recursive_mutex> hold(g_lock);
  auto shape = self.sizes().vec();
  shape[dim] = index.numel();
  TORCH_CHECK(out.sizes() == shape && self.device() == index.device() && self.device() == out.device(), "late: index_select");
  Raw a(self), i(index), o(out);
  queue(self, "gather", [a, i, o, dim] {
    auto t = o.cpu(), ids = i.cpu();
    i.touched(false, "gather's ids");
    a.rows(ids, false, "gather");
    o.touched(true, "gather");
    at::index_select_out(t, a.cpu(), dim, ids);
  });
  return out;
}
at::Tensor index_select(const at::Tensor& self, int64_t dim, const at::Tensor& index) {
  auto shape = self.sizes().vec();
  shape[dim] = index.numel();
  auto out = at::empty(shape, self.options());
  return index_select_out(self, dim, index, out);
}
at::Tensor& index_copy_(at::Tensor& self, int64_t dim, const at::Tensor& index, const at::Tensor& source) {
  std::lock_guard<std::recursive_mutex> hold(g_lock);
  TORCH_CHECK(self.device() == index.device() && self.device() == source.device(), "late: index_copy_");
  Raw a(self), i(index), b(source);
  queue(self, "scatter", [a, i, b, dim] {
    auto ids = i.cpu();
    i.touched(false, "scatter's ids");
    b.touched(false, "scatter");
    a.rows(ids, true, "scatter");
    a.cpu().index_copy_(dim, ids, b.cpu());
  });
  return self;
}
at::Tensor& fill_scalar(at::Tensor& self, const at::Scalar& value) {
  std::lock_guard<std::recursive_mutex> hold(g_lock);
  Raw a(self);
  queue(self, "fill", [a, value] { a.touched(true, "fill"); a.cpu().fill_(value); });
  return self;
}
at::Tensor& zero_(at::Tensor& self) { return fill_scalar(self, at::Scalar(0)); }
at::Tensor empty(c10::IntArrayRef size, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
                 std::optional<c10::Device> device, std::optional<bool>, std::optional<c10::MemoryFormat> format) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(size, &g_device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<c10::ScalarType> dtype,
                         std::optional<c10::Layout>, std::optional<c10::Device> device, std::optional<bool>) {
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_strided_generic(size, stride, &g_device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype));
}
at::Tensor as_strided(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<c10::SymInt> offset) {
  return at::cpu::as_strided_symint(self, size, stride, offset);
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
at::Tensor reshape_alias(const at::Tensor& self, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return at::native::_reshape_alias(self, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Scalar scalar(const at::Tensor& self) { return self.cpu().item(); }
at::Tensor& set_storage(at::Tensor& self, at::Storage source) { return at::native::set_(self, source); }
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) { return at::native::set_tensor_(self, source); }
at::Tensor& set_offset(at::Tensor& self, at::Storage s, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::cpu::set_(self, s, offset, size, stride);
}
void record_stream(at::Tensor& self, c10::Stream s) {
  std::lock_guard<std::recursive_mutex> hold(g_lock);
  if (auto* b = block_of(self.const_data_ptr())) b->used.insert(stream_of(s));
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) { at::native::cpu_fallback(op, stack); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", as_strided);
  m.impl("view", view);
  m.impl("_reshape_alias", reshape_alias);
  m.impl("resize_", resize_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("_local_scalar_dense", scalar);
  m.impl("set_.source_Storage", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_.source_Storage_storage_offset", set_offset);
  m.impl("index_select", index_select);
  m.impl("index_select.out", index_select_out);
  m.impl("index_copy_", index_copy_);
  m.impl("fill_.Scalar", fill_scalar);
  m.impl("zero_", zero_);
  m.impl("record_stream", record_stream);
}
TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
}  // namespace late

// --- what the tests call, by ctypes -----------------------------------------------------------------------------------
namespace late {
using Hold = std::lock_guard<std::recursive_mutex>;
extern "C" {
// Run all queued work, forget races and freed memory, and start the schedule of a seed.
void late_reset(uint32_t seed, double eager) {
  Hold hold(g_lock);
  for (auto& s : g_streams) s.capturing = false;
  for (bool more = true; more;) {
    more = false;
    for (auto& s : g_streams) while (step(&s)) more = true;
  }
  // Unmap freed memory only now: a late access must read overwritten bytes, not fault.
  for (auto it = g_blocks.begin(); it != g_blocks.end();) {
    if (!it->second.freed) { ++it; continue; }
    munmap(const_cast<char*>(it->first), it->second.size);
    munmap(it->second.shadow, it->second.size);
    it = g_blocks.erase(it);
  }
  settle_pinned();
  for (auto it = g_pinned.begin(); it != g_pinned.end();) {
    if (!it->second.freed || it->second.registered) { ++it; continue; }
    free(const_cast<char*>(it->first));
    it = g_pinned.erase(it);
  }
  g_accesses.clear();
  g_races.clear();
  g_random.seed(seed);
  g_eager = eager;
  for (auto& s : g_streams) s.weight = random_weight();
  g_syncs = 0;
}
// The first race since the last reset, or an empty string.
const char* late_race() { return g_races.empty() ? "" : g_races.front().c_str(); }
int64_t late_syncs() { return g_syncs; }
int64_t late_used() { return g_used; }
int64_t late_mapped() { return int64_t(g_blocks.size()); }
void late_capacity(int64_t num_bytes) { g_capacity = num_bytes; }
void late_weight(int64_t stream, double weight) { g_streams.at(stream).weight = weight; }
int64_t late_pending(int64_t stream) { return int64_t(g_streams.at(stream).queue.size()); }
void late_capture(int64_t stream, bool on) { g_streams.at(stream).capturing = on; }
void late_sleep(int64_t steps) {
  Hold hold(g_lock);
  Op op{"sleep"};
  op.left = steps;
  enqueue(current(t_device), std::move(op));
}
int late_host_register(uintptr_t at, size_t size, int device) {
  Hold hold(g_lock);
  if (device != 0) return 101;  // invalid device
  auto* first = reinterpret_cast<char*>(at);
  if (auto it = g_pinned.find(first); it != g_pinned.end() && !it->second.freed) return 712;  // already registered
  g_pinned[first] = Pinned{size, {}, false, true};
  return 0;
}
void late_host_unregister(uintptr_t at) {
  Hold hold(g_lock);
  g_pinned.erase(reinterpret_cast<char*>(at));
}
void late_host_touch(uintptr_t at, size_t size, bool write) {
  Hold hold(g_lock);
  touch(reinterpret_cast<char*>(at), size, write, write ? "a write of the host" : "a read of the host");
}
}  // extern "C"
}  // namespace late
