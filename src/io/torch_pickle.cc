#include "io/torch_pickle.h"

#include <fmt/core.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "base/error_text.h"
#include "io/limits.h"
#include "io/utf8.h"

namespace oscar {
namespace {

constexpr size_t kMaxStack = 1 << 20;
constexpr size_t kMaxKeyBytes = 200;

enum class GlobalKind : uint8_t { kRebuildV2, kRebuildV3, kOrderedDict, kStorage, kDType };

struct Global {
  std::string_view module;
  std::string_view name;
  GlobalKind kind;
  DType dtype = DType::kU8;  // of kStorage and kDType; an untyped storage counts bytes
};

constexpr Global kGlobals[] = {
    {"torch._utils", "_rebuild_tensor_v2", GlobalKind::kRebuildV2},
    {"torch._utils", "_rebuild_tensor_v3", GlobalKind::kRebuildV3},
    {"collections", "OrderedDict", GlobalKind::kOrderedDict},
    {"torch", "FloatStorage", GlobalKind::kStorage, DType::kF32},
    {"torch", "BFloat16Storage", GlobalKind::kStorage, DType::kBf16},
    {"torch", "HalfStorage", GlobalKind::kStorage, DType::kF16},
    {"torch", "DoubleStorage", GlobalKind::kStorage, DType::kF64},
    {"torch", "LongStorage", GlobalKind::kStorage, DType::kI64},
    {"torch", "IntStorage", GlobalKind::kStorage, DType::kI32},
    {"torch", "ShortStorage", GlobalKind::kStorage, DType::kI16},
    {"torch", "CharStorage", GlobalKind::kStorage, DType::kI8},
    {"torch", "ByteStorage", GlobalKind::kStorage, DType::kU8},
    {"torch", "BoolStorage", GlobalKind::kStorage, DType::kBool},
    {"torch.storage", "UntypedStorage", GlobalKind::kStorage, DType::kU8},
    {"torch", "float32", GlobalKind::kDType, DType::kF32},
    {"torch", "bfloat16", GlobalKind::kDType, DType::kBf16},
    {"torch", "float16", GlobalKind::kDType, DType::kF16},
    {"torch", "float64", GlobalKind::kDType, DType::kF64},
    {"torch", "float8_e4m3fn", GlobalKind::kDType, DType::kF8E4M3},
    {"torch", "float8_e5m2", GlobalKind::kDType, DType::kF8E5M2},
    {"torch", "int64", GlobalKind::kDType, DType::kI64},
    {"torch", "int32", GlobalKind::kDType, DType::kI32},
    {"torch", "int16", GlobalKind::kDType, DType::kI16},
    {"torch", "int8", GlobalKind::kDType, DType::kI8},
    {"torch", "uint64", GlobalKind::kDType, DType::kU64},
    {"torch", "uint32", GlobalKind::kDType, DType::kU32},
    {"torch", "uint16", GlobalKind::kDType, DType::kU16},
    {"torch", "uint8", GlobalKind::kDType, DType::kU8},
    {"torch", "bool", GlobalKind::kDType, DType::kBool},
};

using NodeId = uint32_t;

struct StorageRef {
  std::string key;
  DType dtype;
  uint64_t num_elements;
  uint64_t num_bytes;
};

// A tensor whose elements are known to lie inside its storage.
struct TensorRef {
  NodeId storage;
  DType dtype;
  uint64_t offset;  // in elements
  std::vector<int64_t> shape;
  std::vector<int64_t> strides;  // in elements, parallel to shape
  uint64_t num_bytes;            // when contiguous
};

struct None {};
struct ListNode {
  std::vector<NodeId> items;
};
struct TupleNode {
  std::vector<NodeId> items;
};
struct DictNode {
  std::vector<std::pair<NodeId, NodeId>> items;
  bool ordered = false;  // an OrderedDict, which may carry attributes
};

// Nodes live in one table and refer to each other by index, so that the cycles and the sharing that
// a pickle can build cost nothing here; the tree is made from them at the end, within limits.
using Node = std::variant<None, bool, int64_t, double, std::string, ListNode, TupleNode, DictNode,
                          const Global*, StorageRef, TensorRef>;

constexpr std::array<std::string_view, 11> kNodeNames = {
    "none",  "bool", "int",      "float",     "string",  "list",
    "tuple", "dict", "a global", "a storage", "a tensor"};

class Interpreter {
 public:
  Interpreter(std::span<const std::byte> pickle, const TorchLimits& limits)
      : pickle_(pickle), limits_(limits) {}

  // Runs to STOP and returns the value on the stack.
  Result<NodeId> Run() {
    while (true) {
      op_at_ = at_;
      uint8_t op = 0;
      OSCAR_RETURN_IF_ERROR(Read(&op));
      if (op == '.') break;
      if (op_at_ == 0 && op != 0x80) return Unexpected(Error("does not start with PROTO"));
      OSCAR_RETURN_IF_ERROR(Step(op));
    }
    if (stack_.size() != 1 || !marks_.empty()) {
      return Unexpected(Error(fmt::format("STOP with {} values and {} marks on the stack",
                                          stack_.size(), marks_.size())));
    }
    if (at_ != pickle_.size()) {
      return Unexpected(Error(fmt::format("{} bytes after STOP", pickle_.size() - at_)));
    }
    return stack_.back();
  }

  const Node& node(NodeId id) const { return nodes_[id]; }

 private:
  Status Error(std::string_view message) const {
    return DataLoss(fmt::format("pickle byte {}: {}", op_at_, message));
  }

  Status Step(uint8_t op) {
    switch (op) {
      case 0x80: {  // PROTO
        uint8_t version = 0;
        OSCAR_RETURN_IF_ERROR(Read(&version));
        if (op_at_ != 0) return Error("PROTO not at the start");
        if (version != 2) {
          return Error(
              fmt::format("protocol {} is not supported; save with pickle_protocol=2", version));
        }
        return {};
      }
      case '}':
        return Push(DictNode{});
      case ']':
        return Push(ListNode{});
      case ')':
        return Push(TupleNode{});
      case '(':
        if (marks_.size() >= kMaxStack) return Error("too many marks");
        marks_.push_back(stack_.size());
        return {};
      case 'q':
        return Put<uint8_t>();
      case 'r':
        return Put<uint32_t>();
      case 'h':
        return Get<uint8_t>();
      case 'j':
        return Get<uint32_t>();
      case 'X':
        return Unicode();
      case 'J':
        return Int<int32_t>();
      case 'K':
        return Int<uint8_t>();
      case 'M':
        return Int<uint16_t>();
      case 0x8a:
        return Long();
      case 'G':
        return Float();
      case 0x88:
        return Push(true);
      case 0x89:
        return Push(false);
      case 'N':
        return Push(None{});
      case 't':
        return MarkedTuple();
      case 0x85:
      case 0x86:
      case 0x87:
        return ShortTuple(op - 0x84u);
      case 'a':
        return Append();
      case 'e':
        return Appends();
      case 's':
        return SetItem();
      case 'u':
        return SetItems();
      case 'c':
        return GlobalOp();
      case 'Q':
        return PersistentId();
      case 'R':
        return Reduce();
      case 'b':
        return Build();
      default:
        return Error(fmt::format("operation 0x{:02x} is not allowed", op));
    }
  }

  template <typename T>
  Status Read(T* value) {
    if (pickle_.size() - at_ < sizeof(T)) return Error("truncated");
    std::memcpy(value, pickle_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return {};
  }

  Result<std::string_view> ReadBytes(uint64_t size) {
    if (pickle_.size() - at_ < size) return Unexpected(Error("truncated"));
    const std::string_view text(reinterpret_cast<const char*>(pickle_.data()) + at_, size);
    at_ += size;
    return text;
  }

  // Up to and without the next newline.
  Result<std::string_view> ReadLine() {
    constexpr size_t kMaxLine = 256;
    const std::string_view rest(reinterpret_cast<const char*>(pickle_.data()) + at_,
                                std::min(pickle_.size() - at_, kMaxLine));
    const size_t end = rest.find('\n');
    if (end == std::string_view::npos) return Unexpected(Error("GLOBAL without end of line"));
    at_ += end + 1;
    return rest.substr(0, end);
  }

  Status Push(Node node) {
    if (nodes_.size() >= limits_.max_values) {
      return Error(fmt::format("more than {} values", limits_.max_values));
    }
    nodes_.push_back(std::move(node));
    return PushId(static_cast<NodeId>(nodes_.size() - 1));
  }

  Status PushId(NodeId id) {
    if (stack_.size() >= kMaxStack) return Error("stack too deep");
    stack_.push_back(id);
    return {};
  }

  // Values above the last mark.
  size_t Available() const { return stack_.size() - (marks_.empty() ? 0 : marks_.back()); }

  Result<NodeId> Pop() {
    if (Available() == 0) return Unexpected(Error("stack underflow"));
    const NodeId id = stack_.back();
    stack_.pop_back();
    return id;
  }

  Result<std::vector<NodeId>> PopToMark() {
    if (marks_.empty()) return Unexpected(Error("no mark on the stack"));
    const auto first = stack_.begin() + static_cast<ptrdiff_t>(marks_.back());
    std::vector<NodeId> items(first, stack_.end());
    stack_.erase(first, stack_.end());
    marks_.pop_back();
    return items;
  }

  // The container on top of the stack, which an operation fills.
  template <typename T>
  Result<T*> Top(std::string_view wanted) {
    if (Available() == 0) return Unexpected(Error("stack underflow"));
    Node& top = nodes_[stack_.back()];
    if (T* container = std::get_if<T>(&top)) return container;
    return Unexpected(Error(fmt::format("expected {}, found {}", wanted, kNodeNames[top.index()])));
  }

  template <typename T>
  Status Put() {
    T index = 0;
    OSCAR_RETURN_IF_ERROR(Read(&index));
    if (Available() == 0) return Error("nothing to memoize");
    memo_[index] = stack_.back();
    if (memo_.size() > limits_.max_values) return Error("memo too large");
    return {};
  }

  template <typename T>
  Status Get() {
    T index = 0;
    OSCAR_RETURN_IF_ERROR(Read(&index));
    const auto found = memo_.find(index);
    if (found == memo_.end()) return Error(fmt::format("memo has no entry {}", index));
    return PushId(found->second);
  }

  Status Unicode() {
    uint32_t size = 0;
    OSCAR_RETURN_IF_ERROR(Read(&size));
    OSCAR_ASSIGN_OR_RETURN(const std::string_view text, ReadBytes(size));
    if (!IsValidUtf8(text)) return Error("string is not UTF-8");
    return Push(std::string(text));
  }

  template <typename T>
  Status Int() {
    T value = 0;
    OSCAR_RETURN_IF_ERROR(Read(&value));
    return Push(static_cast<int64_t>(value));
  }

  // Little-endian two's complement of as many bytes as it takes.
  Status Long() {
    uint8_t size = 0;
    OSCAR_RETURN_IF_ERROR(Read(&size));
    if (size > 8) return Error(fmt::format("integer of {} bytes does not fit 64 bits", size));
    OSCAR_ASSIGN_OR_RETURN(const std::string_view bytes, ReadBytes(size));
    uint64_t value = 0;
    for (size_t i = 0; i < bytes.size(); ++i) {
      value |= static_cast<uint64_t>(static_cast<uint8_t>(bytes[i])) << (8 * i);
    }
    if (size > 0 && size < 8 && (static_cast<uint8_t>(bytes.back()) & 0x80) != 0) {
      value |= ~uint64_t{0} << (8 * size);
    }
    return Push(static_cast<int64_t>(value));
  }

  Status Float() {  // big-endian, unlike the integers
    OSCAR_ASSIGN_OR_RETURN(const std::string_view bytes, ReadBytes(8));
    uint64_t bits = 0;
    for (const char c : bytes) bits = bits << 8 | static_cast<uint8_t>(c);
    return Push(std::bit_cast<double>(bits));
  }

  Status MarkedTuple() {
    OSCAR_ASSIGN_OR_RETURN(std::vector<NodeId> items, PopToMark());
    return Push(TupleNode{std::move(items)});
  }

  Status ShortTuple(size_t size) {
    if (Available() < size) return Error("stack underflow");
    const auto first = stack_.end() - static_cast<ptrdiff_t>(size);
    std::vector<NodeId> items(first, stack_.end());
    stack_.erase(first, stack_.end());
    return Push(TupleNode{std::move(items)});
  }

  Status Append() {
    OSCAR_ASSIGN_OR_RETURN(const NodeId item, Pop());
    OSCAR_ASSIGN_OR_RETURN(ListNode * list, Top<ListNode>("a list"));
    list->items.push_back(item);
    return {};
  }

  Status Appends() {
    OSCAR_ASSIGN_OR_RETURN(const std::vector<NodeId> items, PopToMark());
    OSCAR_ASSIGN_OR_RETURN(ListNode * list, Top<ListNode>("a list"));
    list->items.insert(list->items.end(), items.begin(), items.end());
    return {};
  }

  Status SetItem() {
    OSCAR_ASSIGN_OR_RETURN(const NodeId value, Pop());
    OSCAR_ASSIGN_OR_RETURN(const NodeId key, Pop());
    OSCAR_ASSIGN_OR_RETURN(DictNode * dict, Top<DictNode>("a dict"));
    dict->items.emplace_back(key, value);
    return {};
  }

  Status SetItems() {
    OSCAR_ASSIGN_OR_RETURN(const std::vector<NodeId> items, PopToMark());
    if (items.size() % 2 != 0) return Error("SETITEMS with a key that has no value");
    OSCAR_ASSIGN_OR_RETURN(DictNode * dict, Top<DictNode>("a dict"));
    for (size_t i = 0; i < items.size(); i += 2) dict->items.emplace_back(items[i], items[i + 1]);
    return {};
  }

  Status GlobalOp() {
    OSCAR_ASSIGN_OR_RETURN(const std::string_view module, ReadLine());
    OSCAR_ASSIGN_OR_RETURN(const std::string_view name, ReadLine());
    for (const Global& global : kGlobals) {
      if (global.module == module && global.name == name) return Push(&global);
    }
    return Error(fmt::format("global {} is not allowed (nothing in the file is executed)",
                             Quote(fmt::format("{}.{}", module, name))));
  }

  template <typename T>
  const T* As(NodeId id) const {
    return std::get_if<T>(&nodes_[id]);
  }

  const Global* AsGlobal(NodeId id, GlobalKind kind) const {
    const auto* global = As<const Global*>(id);
    return global != nullptr && (*global)->kind == kind ? *global : nullptr;
  }

  // ('storage', class, key, device, number of elements)
  Status PersistentId() {
    OSCAR_ASSIGN_OR_RETURN(const NodeId id, Pop());
    const auto* tuple = As<TupleNode>(id);
    if (tuple == nullptr || tuple->items.size() != 5) {
      return Error("persistent id is not a tuple of five");
    }
    const auto* tag = As<std::string>(tuple->items[0]);
    const Global* storage = AsGlobal(tuple->items[1], GlobalKind::kStorage);
    const auto* key = As<std::string>(tuple->items[2]);
    const auto* device = As<std::string>(tuple->items[3]);
    const auto* count = As<int64_t>(tuple->items[4]);
    if (tag == nullptr || *tag != "storage" || storage == nullptr || key == nullptr ||
        device == nullptr || count == nullptr) {
      return Error("persistent id is not ('storage', class, key, device, count)");
    }
    if (key->empty() || key->size() > kMaxKeyBytes) return Error("storage key of a bad length");
    const std::array<int64_t, 1> shape = {*count};
    const auto bytes = CheckedNumBytes(storage->dtype, shape);
    if (!bytes) return Error(fmt::format("storage of {} elements", *count));
    return Push(StorageRef{*key, storage->dtype, static_cast<uint64_t>(*count), *bytes});
  }

  Status Reduce() {
    OSCAR_ASSIGN_OR_RETURN(const NodeId args_id, Pop());
    OSCAR_ASSIGN_OR_RETURN(const NodeId callee, Pop());
    const auto* args = As<TupleNode>(args_id);
    if (args == nullptr) return Error("REDUCE without a tuple of arguments");
    if (AsGlobal(callee, GlobalKind::kOrderedDict) != nullptr) {
      if (!args->items.empty()) return Error("OrderedDict with arguments");
      DictNode dict;
      dict.ordered = true;
      return Push(std::move(dict));
    }
    if (AsGlobal(callee, GlobalKind::kRebuildV2) != nullptr) return Rebuild(args->items, false);
    if (AsGlobal(callee, GlobalKind::kRebuildV3) != nullptr) return Rebuild(args->items, true);
    return Error("REDUCE of something that makes no value");
  }

  // Attributes of an OrderedDict (a state dict's _metadata) carry no values that we use.
  Status Build() {
    OSCAR_ASSIGN_OR_RETURN(const NodeId state, Pop());
    OSCAR_ASSIGN_OR_RETURN(const DictNode* dict, Top<DictNode>("an OrderedDict"));
    if (!dict->ordered || As<DictNode>(state) == nullptr) {
      return Error("BUILD of something other than an OrderedDict from a dict");
    }
    return {};
  }

  Result<std::vector<int64_t>> IntTuple(NodeId id, std::string_view what) const {
    const auto* tuple = As<TupleNode>(id);
    if (tuple == nullptr) return Unexpected(Error(fmt::format("{} is not a tuple", what)));
    if (tuple->items.size() > kMaxRank) {
      return Unexpected(Error(fmt::format("more than {} dimensions", kMaxRank)));
    }
    std::vector<int64_t> values;
    for (const NodeId item : tuple->items) {
      const auto* value = As<int64_t>(item);
      if (value == nullptr || *value < 0) {
        return Unexpected(Error(fmt::format("{} has an entry that is not a natural number", what)));
      }
      values.push_back(*value);
    }
    return values;
  }

  bool IsEmptyDictOrNone(NodeId id) const {
    if (As<None>(id) != nullptr) return true;
    const auto* dict = As<DictNode>(id);
    return dict != nullptr && dict->items.empty();
  }

  // v2: (storage, offset, size, stride, requires_grad, backward_hooks[, metadata])
  // v3: (storage, offset, size, stride, requires_grad, backward_hooks, dtype[, metadata])
  Status Rebuild(const std::vector<NodeId>& args, bool v3) {
    const size_t required = v3 ? 7 : 6;
    if (args.size() != required && args.size() != required + 1) {
      return Error(fmt::format("tensor rebuilt from {} arguments", args.size()));
    }
    const auto* storage = As<StorageRef>(args[0]);
    const auto* offset = As<int64_t>(args[1]);
    if (storage == nullptr || offset == nullptr || *offset < 0) {
      return Error("tensor without a storage or a valid offset");
    }
    TensorRef tensor{.storage = args[0],
                     .dtype = storage->dtype,
                     .offset = static_cast<uint64_t>(*offset),
                     .shape = {},
                     .strides = {},
                     .num_bytes = 0};
    OSCAR_ASSIGN_OR_RETURN(tensor.shape, IntTuple(args[2], "tensor size"));
    OSCAR_ASSIGN_OR_RETURN(tensor.strides, IntTuple(args[3], "tensor stride"));
    if (tensor.shape.size() != tensor.strides.size()) {
      return Error("tensor size and stride of different lengths");
    }
    if (As<bool>(args[4]) == nullptr || !IsEmptyDictOrNone(args[5]) ||
        (args.size() > required && !IsEmptyDictOrNone(args[required]))) {
      return Error("tensor with hooks or metadata is not supported");
    }
    if (v3) {
      const Global* dtype = AsGlobal(args[6], GlobalKind::kDType);
      if (dtype == nullptr) return Error("tensor without a dtype");
      tensor.dtype = dtype->dtype;
    }
    const auto bytes = CheckedNumBytes(tensor.dtype, tensor.shape);
    if (!bytes) return Error(bytes.error().message());
    tensor.num_bytes = *bytes;
    const uint64_t capacity = storage->num_bytes / SizeOf(tensor.dtype);
    if (!InsideStorage(tensor, capacity)) {
      return Error(fmt::format(
          "tensor of size {}, stride {}, offset {} leaves its storage {} of {} elements",
          ShapeToString(tensor.shape), ShapeToString(tensor.strides), tensor.offset,
          Quote(storage->key), capacity));
    }
    return Push(std::move(tensor));
  }

  static bool InsideStorage(const TensorRef& tensor, uint64_t capacity) {
    if (tensor.offset > capacity) return false;
    if (tensor.num_bytes == 0) return true;
    uint64_t last = tensor.offset;
    for (size_t i = 0; i < tensor.shape.size(); ++i) {
      const auto steps = static_cast<uint64_t>(tensor.shape[i] - 1);
      const auto stride = static_cast<uint64_t>(tensor.strides[i]);
      // last <= capacity < 2^63 throughout, so the sum cannot wrap once the product is bounded.
      if (stride > 0 && steps > capacity / stride) return false;
      last += steps * stride;
      if (last >= capacity) return false;
    }
    return last < capacity;
  }

  std::span<const std::byte> pickle_;
  const TorchLimits& limits_;
  size_t at_ = 0;
  size_t op_at_ = 0;
  std::vector<Node> nodes_;
  std::vector<NodeId> stack_;
  std::vector<size_t> marks_;  // stack sizes
  std::unordered_map<uint32_t, NodeId> memo_;
};

// Turns the table of nodes into a tree. Errors name the place by its keys: "layers/3/rotation".
class TreeBuilder {
 public:
  TreeBuilder(const Interpreter& interpreter, const TorchStorageLoader& load,
              const TorchLimits& limits, uint64_t max_values, uint64_t max_copy_bytes)
      : interpreter_(interpreter),
        load_(load),
        limits_(limits),
        max_values_(max_values),
        max_copy_bytes_(max_copy_bytes) {}

  Result<TorchValue> Make(NodeId id, int depth) {
    if (depth > kMaxTorchDepth) {
      return Unexpected(Error(fmt::format("nested deeper than {} levels", kMaxTorchDepth)));
    }
    const Node& node = interpreter_.node(id);
    OSCAR_RETURN_IF_ERROR(Charge(1));
    if (std::holds_alternative<None>(node)) return TorchValue();
    if (const auto* value = std::get_if<bool>(&node)) return TorchValue(*value);
    if (const auto* value = std::get_if<int64_t>(&node)) return TorchValue(*value);
    if (const auto* value = std::get_if<double>(&node)) return TorchValue(*value);
    if (const auto* value = std::get_if<std::string>(&node)) {
      OSCAR_RETURN_IF_ERROR(Charge(value->size() / 16));
      return TorchValue(*value);
    }
    if (const auto* value = std::get_if<TensorRef>(&node)) return MakeTensor(id, *value);
    if (const auto* list = std::get_if<ListNode>(&node)) {
      OSCAR_ASSIGN_OR_RETURN(TorchList items, MakeItems(list->items, depth));
      return TorchValue(std::move(items));
    }
    if (const auto* tuple = std::get_if<TupleNode>(&node)) {
      OSCAR_ASSIGN_OR_RETURN(TorchList items, MakeItems(tuple->items, depth));
      return TorchValue(TorchTuple{std::move(items)});
    }
    if (const auto* dict = std::get_if<DictNode>(&node)) return MakeDict(*dict, depth);
    return Unexpected(Error(fmt::format("{} is not a value", kNodeNames[node.index()])));
  }

 private:
  Status Error(std::string_view message) const {
    return DataLoss(fmt::format("at {}: {}", Quote(path_.empty() ? "/" : path_), message));
  }

  // A value may stand in the tree many times at the price of two bytes each; this bounds the tree,
  // and text by the 16 bytes.
  Status Charge(uint64_t values) {
    values_ += values;
    if (values_ <= max_values_) return {};
    return Error(fmt::format("the tree has more than {} values", max_values_));
  }

  Result<TorchValue> MakeChild(std::string_view name, NodeId id, int depth) {
    const size_t size = path_.size();
    path_ += path_.empty() ? "" : "/";
    path_ += name;
    auto child = Make(id, depth + 1);
    path_.resize(size);
    return child;
  }

  Result<TorchList> MakeItems(const std::vector<NodeId>& ids, int depth) {
    TorchList items;
    for (size_t i = 0; i < ids.size(); ++i) {
      OSCAR_ASSIGN_OR_RETURN(TorchValue item, MakeChild(std::to_string(i), ids[i], depth));
      items.push_back(std::move(item));
    }
    return items;
  }

  Result<TorchValue> MakeDict(const DictNode& node, int depth) {
    TorchDict dict;
    std::unordered_set<int64_t> ints;
    std::unordered_set<std::string> strings;
    for (const auto& [key_id, value_id] : node.items) {
      const Node& key_node = interpreter_.node(key_id);
      std::string name;
      TorchKey key;
      bool fresh = false;
      if (const auto* number = std::get_if<int64_t>(&key_node)) {
        key = *number;
        name = std::to_string(*number);
        fresh = ints.insert(*number).second;
      } else if (const auto* text = std::get_if<std::string>(&key_node)) {
        OSCAR_RETURN_IF_ERROR(Charge(text->size() / 16));
        key = *text;
        name = text->substr(0, 64);
        fresh = strings.insert(*text).second;
      } else {
        return Unexpected(
            Error(fmt::format("dict key is {}; only int and string keys are supported",
                              kNodeNames[key_node.index()])));
      }
      if (!fresh) return Unexpected(Error(fmt::format("duplicate key {}", Quote(name))));
      OSCAR_ASSIGN_OR_RETURN(TorchValue value, MakeChild(name, value_id, depth));
      dict.items.emplace_back(std::move(key), std::move(value));
    }
    return TorchValue(std::move(dict));
  }

  Result<TorchStorageBytes> Load(const StorageRef& storage) {
    const auto found = storages_.find(storage.key);
    if (found != storages_.end()) {
      if (found->second->size() == storage.num_bytes) return found->second;
      return Unexpected(
          Error(fmt::format("storage {} has {} bytes here and {} elsewhere", Quote(storage.key),
                            storage.num_bytes, found->second->size())));
    }
    if (storage.num_bytes > limits_.max_tensor_bytes - held_bytes_) return Unexpected(TooLarge());
    auto loaded = load_(storage.key, storage.num_bytes);
    if (!loaded) {
      return Unexpected(Status(loaded.error().code(), Error(loaded.error().message()).message()));
    }
    if ((*loaded)->size() != storage.num_bytes) {
      return Unexpected(
          Error(fmt::format("storage {} has {} bytes, the pickle says {}", Quote(storage.key),
                            (*loaded)->size(), storage.num_bytes)));
    }
    held_bytes_ += storage.num_bytes;
    storages_.emplace(storage.key, *loaded);
    return std::move(*loaded);
  }

  Status TooLarge() const {
    return ResourceExhausted(
        Error(fmt::format("more than {} bytes of tensors", limits_.max_tensor_bytes)).message());
  }

  Result<TorchValue> MakeTensor(NodeId id, const TensorRef& ref) {
    OSCAR_RETURN_IF_ERROR(Charge(ref.shape.size()));
    if (const auto found = tensors_.find(id); found != tensors_.end()) {
      return TorchValue(found->second);
    }
    OSCAR_ASSIGN_OR_RETURN(TorchStorageBytes storage,
                           Load(std::get<StorageRef>(interpreter_.node(ref.storage))));
    TorchTensor tensor{.dtype = ref.dtype, .shape = ref.shape, .data = {}, .owner = nullptr};
    if (ref.num_bytes > 0 && IsContiguous(ref)) {
      tensor.data = std::span(*storage).subspan(ref.offset * SizeOf(ref.dtype), ref.num_bytes);
      tensor.owner = std::move(storage);
    } else if (ref.num_bytes > 0) {
      if (ref.num_bytes > limits_.max_tensor_bytes - held_bytes_) return Unexpected(TooLarge());
      if (ref.num_bytes > max_copy_bytes_ - copied_bytes_) {
        return Unexpected(
            Error(fmt::format("non-contiguous tensors take more than {} bytes, which is out of "
                              "proportion to the file",
                              max_copy_bytes_)));
      }
      held_bytes_ += ref.num_bytes;
      copied_bytes_ += ref.num_bytes;
      auto copy = std::make_shared<const std::vector<std::byte>>(Gather(ref, *storage));
      tensor.data = *copy;
      tensor.owner = std::move(copy);
    }
    tensors_.emplace(id, tensor);
    return TorchValue(std::move(tensor));
  }

  static bool IsContiguous(const TensorRef& ref) {
    int64_t expected = 1;
    for (size_t i = ref.shape.size(); i-- > 0;) {
      if (ref.shape[i] != 1 && ref.strides[i] != expected) return false;
      expected *= ref.shape[i];
    }
    return true;
  }

  // Row-major copy of a tensor with at least one element.
  static std::vector<std::byte> Gather(const TensorRef& ref, std::span<const std::byte> storage) {
    const size_t size = SizeOf(ref.dtype);
    std::vector<std::byte> out(ref.num_bytes);
    std::vector<int64_t> index(ref.shape.size(), 0);
    uint64_t from = ref.offset;
    for (size_t to = 0; to < out.size(); to += size) {
      std::memcpy(out.data() + to, storage.data() + from * size, size);
      for (size_t dim = index.size(); dim-- > 0;) {
        const auto stride = static_cast<uint64_t>(ref.strides[dim]);
        if (++index[dim] < ref.shape[dim]) {
          from += stride;
          break;
        }
        from -= stride * static_cast<uint64_t>(ref.shape[dim] - 1);
        index[dim] = 0;
      }
    }
    return out;
  }

  const Interpreter& interpreter_;
  const TorchStorageLoader& load_;
  const TorchLimits& limits_;
  const uint64_t max_values_;
  const uint64_t max_copy_bytes_;
  uint64_t values_ = 0;
  uint64_t held_bytes_ = 0;
  uint64_t copied_bytes_ = 0;
  std::string path_;
  std::unordered_map<std::string, TorchStorageBytes> storages_;
  std::unordered_map<NodeId, TorchTensor> tensors_;
};

}  // namespace

Result<TorchValue> ParseTorchPickle(std::span<const std::byte> pickle, std::string_view what,
                                    const TorchStorageLoader& load, const TorchLimits& limits,
                                    uint64_t max_copy_bytes) {
  if (pickle.size() > limits.max_pickle_bytes) {
    return Unexpected(OutOfRange(fmt::format("{}: pickle of {} bytes, more than the limit of {}",
                                             what, pickle.size(), limits.max_pickle_bytes)));
  }
  Interpreter interpreter(pickle, limits);
  const auto root = interpreter.Run();
  if (!root) return Unexpected(root.error().WithContext(what));
  // Honest files repeat little; 16 values a byte is beyond what any of them needs.
  const uint64_t max_values = std::min<uint64_t>(limits.max_values, 4096 + 16 * pickle.size());
  TreeBuilder builder(interpreter, load, limits, max_values, max_copy_bytes);
  auto value = builder.Make(*root, 0);
  if (!value) return Unexpected(value.error().WithContext(what));
  return value;
}

}  // namespace oscar
