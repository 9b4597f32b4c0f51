// Syntax tree of a template. Owned by the Template, immutable after parsing.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/jinja/value.h"

namespace oscar::jinja {

struct Filter;  // text/jinja/builtins.h
struct Test;

using Symbol = uint32_t;  // index into the template's list of names

enum class ExprKind : uint8_t {
  kConstant,   // constant
  kName,       // symbol
  kList,       // children
  kTuple,      // children
  kDict,       // children: key, value, key, value, ...
  kAttribute,  // children[0] . text
  kItem,       // children[0] [ children[1] ]
  kSlice,      // children[0] [ children[1] : children[2] : children[3] ], null where left out
  kCall,       // children[0] ( children[1..], keywords )
  kFilter,     // children[0] | filter ( children[1..], keywords ); children[0] null in a block
  kTest,       // children[0] is test ( children[1..], keywords )
  kNot,
  kNegate,
  kPlus,
  kAnd,
  kOr,
  kArithmetic,  // children[0] text children[1]
  kConcat,      // children joined as text
  kCompare,     // children[0] operators[0] children[1] operators[1] ...
  kCondition,   // children: condition, then, else (may be null)
};

struct Expr {
  ExprKind kind = ExprKind::kConstant;
  int line = 1;
  int depth = 1;
  Symbol symbol = 0;
  std::string text;
  Value constant;
  const Filter* filter = nullptr;
  const Test* test = nullptr;
  std::vector<std::unique_ptr<Expr>> children;
  std::vector<std::pair<std::string, std::unique_ptr<Expr>>> keywords;
  std::vector<std::string> operators;
};
using ExprPtr = std::unique_ptr<Expr>;

// What `set` and `for` assign to.
struct Target {
  enum class Kind : uint8_t { kName, kAttribute, kTuple };
  Kind kind = Kind::kName;
  Symbol symbol = 0;
  std::string attribute;      // kAttribute: of a namespace
  std::vector<Target> parts;  // kTuple
};

struct Statement;
using Block = std::vector<std::unique_ptr<Statement>>;

struct Macro {
  std::string name;
  std::vector<Symbol> parameters;
  std::vector<std::string> parameter_names;
  std::vector<ExprPtr> defaults;  // of the last parameters
  Block body;
  bool takes_extra_positional = false;  // the body mentions varargs
  bool takes_extra_keywords = false;    // ... kwargs
  bool takes_caller = false;            // ... caller
};

enum class StatementKind : uint8_t {
  kText,         // text
  kPrint,        // exprs[0]
  kIf,           // exprs[i] guards blocks[i]; one more block is the else
  kFor,          // target in exprs[0] if exprs[1] (may be null); blocks: body, else
  kSet,          // target = exprs[0]
  kSetBlock,     // target = blocks[0] through exprs[0] (filters, may be null)
  kMacro,        // symbol, macro
  kCallBlock,    // exprs[0] (a call) with macro as its caller
  kFilterBlock,  // blocks[0] through exprs[0]
  kWith,         // targets[i] = exprs[i] in blocks[0]
  kScope,        // blocks[0] as it stands
  kBreak,
  kContinue,
};

struct Statement {
  StatementKind kind = StatementKind::kText;
  int line = 1;
  std::string text;
  Symbol symbol = 0;
  std::vector<ExprPtr> exprs;
  std::vector<Block> blocks;
  std::vector<Target> targets;
  std::unique_ptr<Macro> macro;
};

struct SyntaxTree {
  Block body;
  std::vector<std::string> names;  // by symbol
};

}  // namespace oscar::jinja
