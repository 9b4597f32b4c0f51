// PrefixIndex: pages of earlier sequences, found again by their tokens. A tree over 64-token pages,
// keyed by a hash chain (XXH3, one chain a salt); tokens and parents are compared, so a collision
// is a miss and never a wrong page. A page may be kept in two forms: open (BF16, as it was
// computed) and sealed; a partly filled last page hangs below its parent as a leaf of fewer tokens.
//
// Where sequences have a recurrent state (CacheConfig::state), a node may hold a snapshot of it, as
// it was after the node's last token, and a prefix can be used only up to a snapshot. Snapshots
// have their own budget inside the pool's, and go by their own least recent use.
//
// *Exact* pages are those whose every row a fresh prompt of the same tokens would compute, bit for
// bit; the rest hold generated tokens, or follow from a hit that was not exact. The rules are in
// docs/engine-contract.md section 4.
//
// Belongs to the engine thread; holds one reference to each page, which counts against the pool.
#pragma once

#include <cstdint>
#include <limits>
#include <list>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <vector>

#include "cache/page_pool.h"
#include "cache/sequence_cache.h"
#include "engine/prefix_store.h"

namespace oscar {

// Appends the chain hashes of the full pages of `tokens` that `hashes` does not have yet. Any
// thread.
void ExtendPageHashes(std::string_view salt, std::span<const int32_t> tokens,
                      std::vector<uint64_t>* hashes);

// A token history and the chain hashes of its full pages.
struct PageKey {
  std::string_view salt;
  std::span<const int32_t> tokens;
  std::span<const uint64_t> hashes;
};

class PrefixIndex {
 public:
  struct Hit {
    SequenceCache cache;
    // A fresh prompt would be in the same state at this length.
    bool exact = true;
    // Leading tokens whose rows are exact.
    int64_t exact_tokens = 0;
    // Leading tokens whose pages are there, of which a snapshot is lacking: whoever computes them
    // again may keep one. A multiple of a page; 0: there are no more of them than were used.
    int64_t without_state = 0;
    // How long the hit would be if what layers with a window see there were kept, too.
    int64_t without_window = 0;
  };

  enum class Keep : uint8_t {
    kImmutable,  // full sink pages and sealed pages: safe while the sequence grows
    kFullPages,  // open ones too, which the sequence then cannot seal in place
    kAll,        // and the partly filled last page: the sequence has ended
    kWindow,     // full pages; what layers with a window see at the end stays open
  };

  // What the monitor shows of one kept branch.
  struct Branch {
    std::string salt;
    int64_t tokens = 0;
    std::string pages;  // as in SequenceInfo::pages
    CacheUsage usage;
  };

  // With `exact_only`, what is not exact is neither kept nor found. `snapshot_bytes`: of states,
  // at most.
  PrefixIndex(const CacheConfig& config, PagePool& pool, bool exact_only,
              uint64_t snapshot_bytes = 0)
      : config_(config), pool_(pool), exact_only_(exact_only), snapshot_budget_(snapshot_bytes) {}

  // The longest usable prefix of at most `limit` tokens; an empty cache where there is none.
  Hit Match(const PageKey& key, int64_t limit, bool exact_only);
  // Keeps the pages of `cache`, which holds the first tokens of `key`; `exact_tokens` of them are
  // exact. What is there already stays, unless it is less exact. Its snapshots are kept at pages
  // that are, and with kAll its state as well. With kWindow, pages below `limit` alone.
  void Insert(const PageKey& key, const SequenceCache& cache, int64_t exact_tokens, Keep keep,
              int64_t limit = std::numeric_limits<int64_t>::max());

  // Pages without a salt that never change, and those in windows, are also handed to `store`, which
  // may be null, and those it has from an earlier run are taken up, as far as half of the budget
  // reaches. They are not exact: another processor may have computed them. For methods that seal
  // page by page.
  void AttachStore(PrefixStore* store);

  // Drops least recently used pages that nobody else holds until `bytes` can be allocated. False
  // when they do not suffice.
  bool EvictFor(uint64_t bytes);
  // Bytes that EvictFor could free; may stop counting at `enough`.
  uint64_t EvictableBytes(uint64_t enough) const;
  // When EvictFor did not suffice: gives up what stops sequences from sealing or writing in place
  // (open pages past the sink and partly filled ones that somebody else holds too), and pages of
  // its own that stayed only because pages in use hang below them. False when there were none.
  bool ReleaseShared();
  void Clear();

  // Drops least recently used snapshots until `bytes` more would fit the budget of snapshots. False
  // where that is less than `bytes`.
  bool MakeRoomForSnapshot(uint64_t bytes);
  uint64_t snapshot_bytes() const { return snapshots_.size() * config_.state.bytes(); }
  uint64_t evictions() const { return evictions_; }
  size_t num_nodes() const { return nodes_.size(); }
  // Calls body(page, page index, sealed) for every page held.
  template <typename Body>
  void ForEachPage(const Body& body) const {
    for (const auto& [hash, node] : nodes_) {
      if (node->open.page) body(node->open.page, node->index, false);
      if (node->sealed.page) body(node->sealed.page, node->index, true);
    }
  }
  // Calls body(state) for every snapshot held.
  template <typename Body>
  void ForEachSnapshot(const Body& body) const {
    for (const Node* node : snapshots_) body(node->state);
  }
  // Branches nobody uses, most recent first.
  std::vector<Branch> UnusedBranches(size_t limit) const;

 private:
  struct Form {
    PageRef page;
    int exact_tokens = 0;  // leading ones; 64 or 0 for a sealed page
    uint64_t group = 0;    // pages that were sealed together have one number
  };
  struct Node {
    Node* parent = nullptr;  // null: a root
    uint64_t hash = 0;
    int64_t index = -1;  // of the page in its sequence
    std::vector<int32_t> tokens;
    Form open, sealed;
    // After the last of `tokens`; a fresh prompt would have the same where `state_exact`.
    PageRef state;
    bool state_exact = false;
    std::list<Node*>::iterator snapshot;  // in snapshots_, where there is a state
    // The open form is what layers with a window see where texts diverge; it stays beside a sealed
    // one.
    bool in_window = false;
    // A sequence ended with this page, its pages [sink, kept_sealed_end) sealed; -1: none did.
    int64_t kept_sealed_end = -1;
    std::vector<Node*> children;
    std::list<Node*>::iterator recency;
  };
  struct Path {
    std::vector<Node*> nodes;  // by page; the last may match in part
    int64_t tokens = 0;
  };

  // What of a path a sequence would be given.
  struct Use {
    int64_t length = 0;
    bool exact = true;
    int64_t exact_tokens = 0;
    std::vector<bool> sealed;    // by page: which form
    int64_t without_window = 0;  // see Hit
  };

  Node* FindChild(const Node* parent, uint64_t hash, std::span<const int32_t> tokens) const;
  Path Walk(const PageKey& key, int64_t limit) const;
  // The longest that is stored, whatever the states.
  Use UseUpTo(const Path& path, int64_t limit, bool exact_only) const;
  // The same up to a snapshot, the newest that serves.
  Use UseWithState(const Path& path, int64_t limit, bool exact_only) const;
  void KeepState(Node* node, const PageRef& state, bool exact);
  void DropState(Node* node);
  int64_t ExactLength(const Path& path, int64_t limit) const;
  // Pages that were sealed when the last sequence which ended on the path, and whose tokens are
  // all below `length`, did so; 0 where there is none.
  int64_t KeptSealedEnd(const Path& path, int64_t length) const;
  // The longest length <= `limit`, and which pages are taken sealed.
  // `without_window`: the same if layers with a window needed nothing.
  int64_t StoredLength(const Path& path, int64_t limit, std::vector<bool>* sealed,
                       int64_t* without_window) const;
  bool SealedGroup(const Path& path, int64_t first, int64_t length, bool exact) const;
  bool OpenGroup(const Path& path, int64_t first, int64_t length) const;
  int64_t group_pages() const { return config_.page_run(); }
  int64_t sink_pages() const { return config_.sink / kPageTokens; }
  Node* AddChild(Node* parent, uint64_t hash, std::span<const int32_t> tokens);
  bool KeepTail(Node* parent, std::span<const int32_t> tokens, int exact_tokens) const;
  void Touch(Node* leaf);
  bool Restore(const PageRecord& record);
  void Store(const Node& node, bool sealed);
  void Remove(Node* node);
  void RemoveSubtree(Node* node);
  bool Removable(const Node& node, const Form& form, const Form& twin) const;

  const CacheConfig& config_;
  PagePool& pool_;
  const bool exact_only_;
  const uint64_t snapshot_budget_;
  std::unordered_map<std::string, std::unique_ptr<Node>> roots_;  // by salt
  std::unordered_map<uint64_t, std::unique_ptr<Node>> nodes_;
  // Least recent first. A node is never more recent than its parent.
  std::list<Node*> recency_;
  std::list<Node*> snapshots_;  // nodes with a state, least recently used first
  PrefixStore* store_ = nullptr;
  uint64_t next_group_ = 1;
  uint64_t evictions_ = 0;
};

}  // namespace oscar
