#include "engine/prefix_index.h"

#include <xxhash.h>

#include <algorithm>
#include <unordered_set>

#include "base/check.h"

namespace oscar {
namespace {

uint64_t HashTokens(uint64_t parent, std::span<const int32_t> tokens) {
  return XXH3_64bits_withSeed(tokens.data(), tokens.size_bytes(), parent);
}

uint64_t HashSalt(std::string_view salt) { return XXH3_64bits(salt.data(), salt.size()); }

std::span<const int32_t> PageOf(std::span<const int32_t> tokens, size_t index) {
  const size_t at = index * kPageTokens;
  return tokens.subspan(at, std::min<size_t>(kPageTokens, tokens.size() - at));
}

}  // namespace

void ExtendPageHashes(std::string_view salt, std::span<const int32_t> tokens,
                      std::vector<uint64_t>* hashes) {
  while ((hashes->size() + 1) * kPageTokens <= tokens.size()) {
    const uint64_t parent = hashes->empty() ? HashSalt(salt) : hashes->back();
    hashes->push_back(HashTokens(parent, PageOf(tokens, hashes->size())));
  }
}

PrefixIndex::Node* PrefixIndex::FindChild(const Node* parent, uint64_t hash,
                                          std::span<const int32_t> tokens) const {
  const auto found = nodes_.find(hash);
  if (found == nodes_.end() || found->second->parent != parent) return nullptr;
  return std::ranges::equal(found->second->tokens, tokens) ? found->second.get() : nullptr;
}

PrefixIndex::Path PrefixIndex::Walk(const PageKey& key, int64_t limit) const {
  Path path;
  const auto root = roots_.find(std::string(key.salt));
  if (root == roots_.end()) return path;
  const Node* at = root->second.get();
  for (size_t i = 0; i < key.hashes.size(); ++i) {
    Node* const child = FindChild(at, key.hashes[i], PageOf(key.tokens, i));
    if (child == nullptr) break;
    path.nodes.push_back(child);
    path.tokens += kPageTokens;
    at = child;
  }
  // Rows of an open page stand for themselves, so its first few may be used alone.
  // Those of a state only to its end, and then as far as the last one that may be used.
  auto rest = key.tokens.subspan(static_cast<size_t>(path.tokens));
  const bool to_states = config_.has_state();
  if (to_states) {
    rest = rest.first(static_cast<size_t>(
        std::clamp<int64_t>(limit - path.tokens, 0, static_cast<int64_t>(rest.size()))));
  }
  Node* best = nullptr;
  int64_t longest = 0;
  for (Node* child : at->children) {
    if (!child->open.page) continue;
    const auto [mine, theirs] = std::ranges::mismatch(rest, child->tokens);
    const int64_t common = mine - rest.begin();
    if (to_states && (!child->state || theirs != child->tokens.end())) continue;
    if (common > longest || (common == longest && best != nullptr &&
                             child->open.exact_tokens > best->open.exact_tokens)) {
      best = child;
      longest = common;
    }
  }
  if (best != nullptr) {
    path.nodes.push_back(best);
    path.tokens += longest;
  }
  return path;
}

// Pages [first, first + together) lie sealed as one group, all of their tokens below `length`.
bool PrefixIndex::SealedGroup(const Path& path, int64_t first, int64_t length, bool exact) const {
  const int64_t together = group_pages();
  if ((first + together) * kPageTokens > std::min(length, path.tokens)) return false;
  const Form& head = path.nodes[static_cast<size_t>(first)]->sealed;
  for (int64_t j = first; j < first + together; ++j) {
    const Form& form = path.nodes[static_cast<size_t>(j)]->sealed;
    if (!form.page || form.group != head.group) return false;
    if (exact && form.exact_tokens < kPageTokens) return false;
  }
  return true;
}

bool PrefixIndex::OpenGroup(const Path& path, int64_t first, int64_t length) const {
  for (int64_t j = first; j < first + group_pages() && j * kPageTokens < length; ++j) {
    if (!path.nodes[static_cast<size_t>(j)]->open.page) return false;
  }
  return true;
}

int64_t PrefixIndex::ExactLength(const Path& path, int64_t limit) const {
  limit = std::min(limit, path.tokens);
  // At a length in cell c, a fresh prompt has sealed everything older than `recent` before the
  // cell; the rest is open.
  for (int64_t c = limit / config_.cell; c >= 0; --c) {
    const int64_t cell_start = c * config_.cell;
    const int64_t sealed_end = SequenceCache::SealedEndAt(config_, cell_start - config_.recent);
    int64_t length = std::min(limit, cell_start + config_.cell - 1);
    for (int64_t j = 0; j * kPageTokens < length;) {
      const Form& open = path.nodes[static_cast<size_t>(j)]->open;
      const bool group_start = j >= sink_pages() && (j - sink_pages()) % group_pages() == 0;
      if (group_start && j < sealed_end && SealedGroup(path, j, length, /*exact=*/true)) {
        j += group_pages();
        continue;
      }
      // An open page in the sealed part will be sealed to the same bytes, but only with its group.
      if (!open.page || open.exact_tokens < kPageTokens) {
        length = std::min(length, j * kPageTokens + (open.page ? open.exact_tokens : 0));
        break;
      }
      ++j;
    }
    if (length > 0 && length >= cell_start) return length;
  }
  return 0;
}

int64_t PrefixIndex::KeptSealedEnd(const Path& path, int64_t length) const {
  for (size_t i = path.nodes.size(); i-- > 0;) {
    const Node& node = *path.nodes[i];
    const auto end = static_cast<int64_t>(i * kPageTokens + node.tokens.size());
    if (node.kept_sealed_end >= 0 && end <= length) return node.kept_sealed_end;
  }
  return 0;
}

int64_t PrefixIndex::StoredLength(const Path& path, int64_t limit, std::vector<bool>* sealed,
                                  int64_t* without_window) const {
  int64_t length = std::min(limit, path.tokens);
  for (bool settled = false; !settled;) {
    settled = true;
    sealed->assign(static_cast<size_t>((length + kPageTokens - 1) / kPageTokens), false);
    const int64_t cell_start = length / config_.cell * config_.cell;
    // A conversation goes on in the forms that it ended in; others read what a fresh prompt would.
    const int64_t sealed_end =
        std::max(SequenceCache::SealedEndAt(config_, cell_start - config_.recent),
                 KeptSealedEnd(path, length));
    for (int64_t j = 0; j * kPageTokens < length;) {
      const bool sink = j < sink_pages();
      const bool open_ok = sink ? static_cast<bool>(path.nodes[static_cast<size_t>(j)]->open.page)
                                : OpenGroup(path, j, length);
      const bool sealed_ok = !sink && SealedGroup(path, j, length, /*exact=*/false);
      if (!open_ok && !sealed_ok) {
        // Open pages at the group's start still serve; without them the length ends here.
        while (path.nodes[static_cast<size_t>(j)]->open.page) ++j;
        length = j * kPageTokens;
        settled = false;
        break;
      }
      const bool take_sealed = sealed_ok && (j < sealed_end || !open_ok);
      const int64_t count = sink ? 1 : group_pages();
      for (int64_t k = j; k < j + count && take_sealed; ++k) {
        (*sealed)[static_cast<size_t>(k)] = true;
      }
      j += count;
    }
    if (!settled) continue;
    if (*without_window == 0) *without_window = length;
    const int64_t usable = LengthWithWindow(
        config_, length, [&](int64_t j) { return (*sealed)[static_cast<size_t>(j)]; });
    settled = usable == length;
    length = usable;
  }
  return length;
}

PrefixIndex::Use PrefixIndex::UseUpTo(const Path& path, int64_t limit, bool exact_only) const {
  Use use;
  int64_t length = ExactLength(path, limit);
  std::vector<bool> sealed(static_cast<size_t>((length + kPageTokens - 1) / kPageTokens), false);
  const int64_t cell_start = length / config_.cell * config_.cell;
  const int64_t sealed_end = SequenceCache::SealedEndAt(config_, cell_start - config_.recent);
  for (int64_t j = sink_pages(); j < sealed_end && length > 0; j += group_pages()) {
    if (!SealedGroup(path, j, length, /*exact=*/true)) continue;
    for (int64_t k = j; k < j + group_pages(); ++k) sealed[static_cast<size_t>(k)] = true;
  }
  use.exact_tokens = length;
  if (!exact_only) {
    std::vector<bool> stored_sealed;
    const int64_t stored = StoredLength(path, limit, &stored_sealed, &use.without_window);
    if (stored > length) {
      length = stored;
      sealed = std::move(stored_sealed);
      use.exact = false;
      use.exact_tokens = 0;
      for (size_t i = 0; i < sealed.size(); ++i) {
        const Node& node = *path.nodes[i];
        const int held =
            static_cast<int>(std::min<int64_t>(kPageTokens, length - use.exact_tokens));
        const int exact =
            std::min(held, sealed[i] ? node.sealed.exact_tokens : node.open.exact_tokens);
        use.exact_tokens += exact;
        if (exact < kPageTokens) break;
      }
    }
  }
  use.length = length;
  use.sealed = std::move(sealed);
  return use;
}

PrefixIndex::Use PrefixIndex::UseWithState(const Path& path, int64_t limit, bool exact_only) const {
  for (size_t i = path.nodes.size(); i-- > 0;) {
    const Node& node = *path.nodes[i];
    const auto end = static_cast<int64_t>(i * kPageTokens + node.tokens.size());
    if (!node.state || end > std::min(limit, path.tokens)) continue;
    if (exact_only && !node.state_exact) continue;
    Use use = UseUpTo(path, end, exact_only);
    if (use.length != end) continue;
    use.exact = use.exact && node.state_exact;
    return use;
  }
  return {};
}

PrefixIndex::Hit PrefixIndex::Match(const PageKey& key, int64_t limit, bool exact_only) {
  Hit hit{SequenceCache(config_, pool_), true, 0, 0, 0};
  const Path path = Walk(key, limit);
  if (path.tokens == 0 || limit <= 0) return hit;
  const bool has_state = config_.has_state();
  const Use use =
      has_state ? UseWithState(path, limit, exact_only) : UseUpTo(path, limit, exact_only);
  const int64_t whole = std::min(limit, path.tokens) / kPageTokens * kPageTokens;
  if (has_state && whole > use.length) hit.without_state = whole;
  hit.without_window = use.without_window;
  hit.exact = use.exact;
  hit.exact_tokens = use.exact_tokens;
  if (use.length == 0) return hit;
  std::vector<SequenceCache::StoredPage> pages;
  for (size_t i = 0; i < use.sealed.size(); ++i) {
    const Node& node = *path.nodes[i];
    pages.push_back({(use.sealed[i] ? node.sealed : node.open).page.Share(), use.sealed[i]});
  }
  Node* const last = path.nodes[use.sealed.size() - 1];
  Touch(last);
  PageRef state;
  if (has_state) {
    state = last->state.Share();
    snapshots_.splice(snapshots_.end(), snapshots_, last->snapshot);
  }
  hit.cache =
      SequenceCache::FromPages(config_, pool_, std::move(pages), use.length, std::move(state));
  return hit;
}

bool PrefixIndex::MakeRoomForSnapshot(uint64_t bytes) {
  if (bytes > snapshot_budget_) return false;
  while (snapshot_bytes() + bytes > snapshot_budget_) DropState(snapshots_.front());
  return true;
}

void PrefixIndex::KeepState(Node* node, const PageRef& state, bool exact) {
  if (exact_only_ && !exact) return;
  if (node->state && (node->state_exact || !exact)) {
    snapshots_.splice(snapshots_.end(), snapshots_, node->snapshot);
    return;
  }
  DropState(node);
  if (!MakeRoomForSnapshot(config_.state.bytes())) return;
  node->state = state.Share();
  node->state_exact = exact;
  node->snapshot = snapshots_.insert(snapshots_.end(), node);
}

void PrefixIndex::DropState(Node* node) {
  if (!node->state) return;
  snapshots_.erase(node->snapshot);
  node->state.Reset();
}

PrefixIndex::Node* PrefixIndex::AddChild(Node* parent, uint64_t hash,
                                         std::span<const int32_t> tokens) {
  if (nodes_.contains(hash)) return nullptr;  // a collision: the older one stays
  auto node = std::make_unique<Node>();
  node->parent = parent;
  node->hash = hash;
  node->index = parent->index + 1;
  node->tokens.assign(tokens.begin(), tokens.end());
  node->recency = recency_.insert(recency_.end(), node.get());
  parent->children.push_back(node.get());
  return nodes_.emplace(hash, std::move(node)).first->second.get();
}

// Whether a partly filled page adds anything to what hangs below `parent`.
bool PrefixIndex::KeepTail(Node* parent, std::span<const int32_t> tokens, int exact_tokens) const {
  if (config_.has_state()) return true;  // its state is that of this length alone
  return std::ranges::none_of(parent->children, [&](const Node* child) {
    return child->open.page && child->tokens.size() >= tokens.size() &&
           std::ranges::equal(std::span(child->tokens).first(tokens.size()), tokens) &&
           std::min(child->open.exact_tokens, static_cast<int>(tokens.size())) >= exact_tokens;
  });
}

void PrefixIndex::Insert(const PageKey& key, const SequenceCache& cache, int64_t exact_tokens,
                         Keep keep, int64_t limit) {
  exact_tokens = std::min(exact_tokens, cache.length());
  limit = std::min(limit, cache.length());
  std::unique_ptr<Node>& root = roots_[std::string(key.salt)];
  if (root == nullptr) root = std::make_unique<Node>();
  Node* at = root.get();
  const auto tokens = key.tokens.first(static_cast<size_t>(cache.length()));
  uint64_t group = 0;
  for (int64_t j = 0; j * kPageTokens < limit; ++j) {
    const auto page_tokens = PageOf(tokens, static_cast<size_t>(j));
    const bool full = page_tokens.size() == kPageTokens, sealed = cache.is_sealed(j);
    if (!full && keep != Keep::kAll) break;
    if (!sealed && j >= sink_pages() && keep == Keep::kImmutable) break;
    const int64_t together = group_pages();
    const int64_t group_start = j - (j - sink_pages()) % together;
    int exact = static_cast<int>(std::clamp<int64_t>(exact_tokens - j * kPageTokens, 0,
                                                     static_cast<int64_t>(page_tokens.size())));
    if (sealed) {
      exact = (group_start + together) * kPageTokens <= exact_tokens ? kPageTokens : 0;
    }
    if (exact_only_ && exact == 0) break;
    const uint64_t hash =
        full ? key.hashes[static_cast<size_t>(j)]
             : HashTokens(j == 0 ? HashSalt(key.salt) : key.hashes[static_cast<size_t>(j - 1)],
                          page_tokens);
    Node* node = FindChild(at, hash, page_tokens);
    if (node == nullptr) {
      if (!full && !KeepTail(at, page_tokens, exact)) break;
      node = AddChild(at, hash, page_tokens);
      if (node == nullptr) break;
    }
    Form& form = sealed ? node->sealed : node->open;
    if (sealed && (j == group_start || group == 0)) {
      const bool known = form.page && form.page.data() == cache.page(j).data();
      group = known ? form.group : next_group_++;
    }
    // Of two equals the one in use stays: the other's memory is then free at once.
    const bool spare = form.page && form.exact_tokens == exact && !form.page.shared() &&
                       form.page.data() != cache.page(j).data();
    if (!form.page || form.exact_tokens < exact || spare) {
      form.page = cache.page(j).Share();
      form.exact_tokens = exact;
      form.group = sealed ? group : 0;
    }
    // What is seen from where a text ends, or diverges from others, stays open; other open pages go
    // when they are sealed.
    if ((keep == Keep::kWindow || keep == Keep::kAll) && config_.window > 0 && !sealed &&
        (j + 1) * kPageTokens > config_.WindowStart(limit)) {
      node->in_window = true;
    } else if (sealed && config_.window > 0 && !exact_only_ && !node->in_window) {
      node->open = Form{};
    }
    // On disk, also the open pages before what is seen from an end: they will not be sealed there.
    const bool is_tail = config_.window > 0 && (keep == Keep::kAll || node->in_window);
    if (full && (sealed || j < sink_pages() || is_tail)) Store(*node, sealed);
    at = node;
    if (config_.has_state()) {
      const auto end = j * kPageTokens + static_cast<int64_t>(page_tokens.size());
      for (const SequenceCache::StateSnapshot& kept : cache.snapshots()) {
        if (kept.length == end) KeepState(node, kept.state, end <= exact_tokens);
      }
      if (keep == Keep::kAll && end == cache.length()) {
        KeepState(node, cache.state(), end <= exact_tokens);
      }
    }
    if (keep == Keep::kAll && j == cache.num_pages() - 1)
      node->kept_sealed_end = cache.sealed_end();
  }
  if (at->parent != nullptr) {
    Touch(at);
  } else if (at->children.empty()) {
    roots_.erase(std::string(key.salt));
  }
}

void PrefixIndex::AttachStore(PrefixStore* store) {
  store_ = nullptr;
  if (store == nullptr) return;
  OSCAR_CHECK(group_pages() == 1 && !exact_only_);
  store->Load([&](const PageRecord& record) { return Restore(record); });
  std::vector<Node*> leaves;
  for (Node* node : recency_) {
    if (node->children.empty()) leaves.push_back(node);
  }
  for (Node* leaf : leaves) Touch(leaf);
  store_ = store;
}

bool PrefixIndex::Restore(const PageRecord& record) {
  Node* parent = nullptr;
  if (record.index == 0 && record.parent == HashSalt("")) {
    std::unique_ptr<Node>& root = roots_[""];
    if (root == nullptr) root = std::make_unique<Node>();
    parent = root.get();
  } else if (const auto found = nodes_.find(record.parent); found != nodes_.end()) {
    parent = found->second.get();
  }
  const bool in_sink = record.index < sink_pages();
  const bool is_kept = record.in_window ? config_.window > 0 && !in_sink : record.sealed != in_sink;
  if (parent == nullptr || parent->index + 1 != record.index || !is_kept) {
    return true;  // its parent is gone
  }
  const PageLayout& shape = record.sealed ? config_.sealed : config_.open;
  if (pool_.bytes_in_use() + shape.bytes() > pool_.budget() / 2) return false;
  Result<PageRef> page = pool_.Allocate(shape);
  if (!page.has_value()) return false;
  const uint64_t hash = record.in_window ? record.hash ^ kWindowPage : record.hash;
  Node* node = FindChild(parent, hash, record.tokens);  // its other form came first
  if (node == nullptr) node = AddChild(parent, hash, record.tokens);
  if (node == nullptr) return true;
  if (!pool_.Write(*page, record.payload).ok()) {
    if (!node->open.page && !node->sealed.page) Remove(node);
    return false;
  }
  node->in_window = node->in_window || record.in_window;
  Form& form = record.sealed ? node->sealed : node->open;
  form.page = std::move(*page);
  form.group = record.sealed ? next_group_++ : 0;
  return true;
}

void PrefixIndex::Store(const Node& node, bool sealed) {
  const PageRef& page = (sealed ? node.sealed : node.open).page;
  const bool in_window = !sealed && node.index >= sink_pages();
  const uint64_t hash = in_window ? node.hash ^ kWindowPage : node.hash;
  if (store_ == nullptr || !store_->Wants(hash, page.layout().bytes())) return;
  const Node* root = node.parent;
  while (root->parent != nullptr) root = root->parent;
  const auto unsalted = roots_.find("");
  if (unsalted == roots_.end() || unsalted->second.get() != root) return;
  const uint64_t parent = node.index == 0 ? HashSalt("") : node.parent->hash;
  PageRecord record{parent, hash, node.index, sealed, in_window, node.tokens, {}};
  record.payload.resize(page.layout().bytes());
  if (pool_.Read(page, record.payload).ok()) store_->Put(std::move(record));
}

void PrefixIndex::Touch(Node* leaf) {
  for (Node* node = leaf; node->parent != nullptr; node = node->parent) {
    recency_.splice(recency_.end(), recency_, node->recency);
  }
}

void PrefixIndex::Remove(Node* node) {
  OSCAR_CHECK(node->children.empty());
  DropState(node);
  Node* const parent = node->parent;
  std::erase(parent->children, node);
  recency_.erase(node->recency);
  nodes_.erase(node->hash);
  if (parent->parent == nullptr && parent->children.empty()) {
    std::erase_if(roots_, [&](const auto& root) { return root.second.get() == parent; });
  }
}

void PrefixIndex::RemoveSubtree(Node* node) {
  // Depth first without recursion: a branch is as long as the longest context.
  while (true) {
    Node* leaf = node;
    while (!leaf->children.empty()) leaf = leaf->children.back();
    const bool last = leaf == node;
    Remove(leaf);
    if (last) return;
  }
}

// A form that only the index holds may go if its node keeps another or has no children.
bool PrefixIndex::Removable(const Node& node, const Form& form, const Form& twin) const {
  return form.page && !form.page.shared() && (twin.page || node.children.empty());
}

bool PrefixIndex::EvictFor(uint64_t bytes) {
  // One pass suffices: children come before their parents. The open form goes first, it is larger.
  for (auto it = recency_.begin(); it != recency_.end() && !pool_.CanAllocate(bytes);) {
    Node* const node = *it++;
    // What follows the snapshot before it is of no use without this one.
    if (node->state && !node->state.shared()) {
      DropState(node);
      ++evictions_;
      if (pool_.CanAllocate(bytes)) break;
    }
    if (Removable(*node, node->open, node->sealed)) {
      node->open = Form{};
      ++evictions_;
    }
    if (!pool_.CanAllocate(bytes) && Removable(*node, node->sealed, node->open)) {
      node->sealed = Form{};
      ++evictions_;
    }
    if (!node->open.page && !node->sealed.page) Remove(node);
  }
  return pool_.CanAllocate(bytes);
}

uint64_t PrefixIndex::EvictableBytes(uint64_t enough) const {
  uint64_t bytes = 0;
  std::unordered_set<const Node*> needed;  // nodes with a descendant that stays
  for (auto it = recency_.begin(); it != recency_.end() && bytes < enough; ++it) {
    const Node& node = **it;
    const bool has_open = static_cast<bool>(node.open.page);
    const bool has_sealed = static_cast<bool>(node.sealed.page);
    const bool is_needed = needed.contains(&node);
    const bool open_goes = has_open && !node.open.page.shared() && (has_sealed || !is_needed);
    const bool open_stays = has_open && !open_goes;
    const bool sealed_goes = has_sealed && !node.sealed.page.shared() && (open_stays || !is_needed);
    if (open_goes) bytes += node.open.page.layout().bytes();
    if (sealed_goes) bytes += node.sealed.page.layout().bytes();
    if (node.state && !node.state.shared()) bytes += config_.state.bytes();
    if (open_stays || (has_sealed && !sealed_goes)) needed.insert(node.parent);
  }
  return bytes;
}

bool PrefixIndex::ReleaseShared() {
  // A sequence that continues from a snapshot would need a copy of it.
  const size_t before = snapshots_.size();
  for (auto it = snapshots_.begin(); it != snapshots_.end();) {
    Node* const node = *it++;
    if (node->state.shared()) DropState(node);
  }
  if (snapshots_.size() != before) return true;
  std::vector<Node*> found;
  const auto blocked = [](const Form& form) { return form.page && !form.page.shared(); };
  for (Node* node : recency_) {
    const bool writable = node->index >= sink_pages() || node->tokens.size() < kPageTokens;
    if ((writable && node->open.page && node->open.page.shared()) || blocked(node->open) ||
        blocked(node->sealed)) {
      found.push_back(node);
    }
  }
  // Children first, so that a subtree that goes takes no node that is still to come.
  for (Node* node : found) {
    node->open = Form{};
    if (blocked(node->sealed)) node->sealed = Form{};
    if (!node->sealed.page) RemoveSubtree(node);
  }
  return !found.empty();
}

void PrefixIndex::Clear() {
  snapshots_.clear();
  recency_.clear();
  nodes_.clear();
  roots_.clear();
}

std::vector<PrefixIndex::Branch> PrefixIndex::UnusedBranches(size_t limit) const {
  std::vector<Branch> branches;
  std::unordered_map<const Node*, std::string_view> salts;
  for (const auto& [salt, root] : roots_) salts.emplace(root.get(), salt);
  for (auto it = recency_.rbegin(); it != recency_.rend() && branches.size() < limit; ++it) {
    const Node* leaf = *it;
    const Form& last = leaf->sealed.page ? leaf->sealed : leaf->open;
    if (!leaf->children.empty() || last.page.shared()) continue;
    Branch branch;
    // What lies above a fork belongs to every branch below it.
    bool forked = false;
    // Counted as SequenceCache::Usage does: rows that hold a token. `elements` is of whole pages.
    uint64_t stored_bits = 0, elements = 0;
    const Node* node = leaf;
    for (; node->parent != nullptr; node = node->parent) {
      forked = forked || node->children.size() > 1;
      branch.tokens += static_cast<int64_t>(node->tokens.size());
      const bool sealed = static_cast<bool>(node->sealed.page);
      const Form& form = sealed ? node->sealed : node->open;
      const bool shared = form.page.shared() || forked;
      const char kind = node->index < sink_pages() ? 's' : sealed ? 'q' : 'r';
      branch.pages.push_back(shared ? static_cast<char>(kind - 'a' + 'A') : kind);
      const uint64_t bytes = form.page.layout().bytes();
      branch.usage.bytes += bytes;
      stored_bits += 8 * (sealed ? bytes : bytes * node->tokens.size() / kPageTokens);
      elements += form.page.layout().elements() * node->tokens.size();
      branch.usage.shared_pages += shared ? 1 : 0;
      if (node->state) branch.usage.state_bytes += config_.state.bytes();
      (sealed ? branch.usage.sealed_pages : branch.usage.open_pages) += 1;
    }
    branch.salt = salts.at(node);
    std::ranges::reverse(branch.pages);
    branch.usage.bytes += branch.usage.state_bytes;
    branch.usage.tokens = static_cast<uint64_t>(branch.tokens);
    branch.usage.bf16_bytes = 2 * elements / kPageTokens;
    if (branch.tokens > 0) {
      branch.usage.bits_per_element =
          2.0 * static_cast<double>(stored_bits) / static_cast<double>(branch.usage.bf16_bytes);
    }
    branches.push_back(std::move(branch));
  }
  return branches;
}

}  // namespace oscar
