#include "io/torch_pickle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "io/test_util.h"

namespace oscar {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

// Pickles are assembled by hand, one operation a piece; `Code` allows zero bytes in literals.
template <size_t N>
std::string Code(const char (&text)[N]) {
  return std::string(text, N - 1);
}

// Storage "0" holds the bytes 0..31; others do not exist.
Result<TorchStorageBytes> LoadStorage(std::string_view key, uint64_t) {
  if (key != "0") return Unexpected(NotFound("no such storage"));
  std::vector<std::byte> bytes(32);
  for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i);
  return std::make_shared<const std::vector<std::byte>>(std::move(bytes));
}

Result<TorchValue> Parse(const std::string& body, const TorchLimits& limits = {}) {
  const std::string pickle = "\x80\x02" + body;
  auto value = ParseTorchPickle(AsBytes(pickle), "p", LoadStorage, limits, 1 << 20);
  if (!value) ExpectOneLineNaming(value.error(), "p: ");
  return value;
}

std::string ErrorOf(const std::string& body) { return MessageOf(Parse(body)); }

const std::string kBytes32 = Code(
    "(X\7\0\0\0storagectorch\nByteStorage\nX\1\0\0\0"
    "0X\3\0\0\0cpuK tQ");
const std::string kUntyped32 = Code(
    "(X\7\0\0\0storagectorch.storage\nUntypedStorage\nX\1\0\0\0"
    "0X\3\0\0\0cpuK tQ");
const std::string kV2 = "ctorch._utils\n_rebuild_tensor_v2\n(";
const std::string kV3 = "ctorch._utils\n_rebuild_tensor_v3\n(";

TEST(TorchPickle, Scalars) {
  EXPECT_TRUE(Parse("N.")->is_none());
  EXPECT_EQ(*Parse(Code("\x8a\0."))->AsInt(), 0);
  EXPECT_EQ(*Parse(Code("\x8a\1\xff."))->AsInt(), -1);
  EXPECT_EQ(*Parse(Code("\x8a\2\xff\0."))->AsInt(), 255);
  EXPECT_EQ(*Parse(Code("\x8a\10\0\0\0\0\0\0\0\x80."))->AsInt(), INT64_MIN);
  EXPECT_EQ(*Parse(Code("J\xff\xff\xff\xff."))->AsInt(), -1);
  EXPECT_EQ(*Parse(Code("G\x3f\xf8\0\0\0\0\0\0."))->AsFloat(), 1.5);
  EXPECT_THAT(ErrorOf(Code("\x8a\11\0\0\0\0\0\0\0\0\1.")), HasSubstr("does not fit 64 bits"));
  EXPECT_THAT(ErrorOf(Code("X\2\0\0\0\xc3(.")), HasSubstr("not UTF-8"));
}

TEST(TorchPickle, StructureErrors) {
  EXPECT_EQ(MessageOf(ParseTorchPickle({}, "p", LoadStorage, {}, 0)),
            "p: pickle byte 0: truncated");
  EXPECT_THAT(MessageOf(ParseTorchPickle(AsBytes("N."), "p", LoadStorage, {}, 0)),
              HasSubstr("PROTO"));
  EXPECT_THAT(MessageOf(ParseTorchPickle(AsBytes("\x80\x04N."), "p", LoadStorage, {}, 0)),
              HasSubstr("protocol 4 is not supported"));
  EXPECT_THAT(ErrorOf("."), HasSubstr("STOP with 0 values"));
  EXPECT_THAT(ErrorOf("NN."), HasSubstr("STOP with 2 values"));
  EXPECT_THAT(ErrorOf("N(."), HasSubstr("1 marks"));
  EXPECT_THAT(ErrorOf("N.N"), HasSubstr("1 bytes after STOP"));
  EXPECT_THAT(ErrorOf("N"), HasSubstr("pickle byte 3: truncated"));
  EXPECT_THAT(ErrorOf(Code("X\xff\xff\xff\xff"
                           "a.")),
              HasSubstr("truncated"));
  EXPECT_THAT(ErrorOf("t."), HasSubstr("no mark"));
  EXPECT_THAT(ErrorOf("N(N\x86."), HasSubstr("underflow"));  // must not reach below the mark
  EXPECT_THAT(ErrorOf("}NNs(NNs."), HasSubstr("stack underflow"));
  EXPECT_THAT(ErrorOf("N(Ne."), HasSubstr("expected a list, found none"));
  EXPECT_THAT(ErrorOf("](K\1K\1u."), HasSubstr("expected a dict, found list"));
  EXPECT_THAT(ErrorOf("}(Nu."), HasSubstr("key that has no value"));
  EXPECT_THAT(ErrorOf("h\5."), HasSubstr("memo has no entry 5"));
  EXPECT_THAT(ErrorOf("q\5N."), HasSubstr("nothing to memoize"));
  EXPECT_THAT(ErrorOf("}(K\1NK\1Nu."), HasSubstr("duplicate key '1'"));
  EXPECT_THAT(ErrorOf("}(NNu."), HasSubstr("dict key is none"));
  EXPECT_THAT(ErrorOf("}(\x88Nu."), HasSubstr("dict key is bool"));
}

// Operations of the format that can run code or reach objects, and some that are merely unused.
TEST(TorchPickle, OtherOperationsAreRefused) {
  for (const char op :
       {'i',    'o',    '\x81', '\x92', '\x93', 'P',    '0',    '1',    '2',    'p',
        'g',    'I',    'L',    'F',    'S',    'T',    'U',    'V',    'd',    'l',
        '\x82', '\x83', '\x84', '\x8b', '\x8c', '\x8d', '\x8e', '\x8f', '\x90', '\x91',
        '\x94', '\x95', '\x96', '\x97', '\x98', 'B',    'C'}) {
    EXPECT_THAT(ErrorOf(std::string("N") + op + "."), HasSubstr("pickle byte 3: operation 0x"))
        << op;
  }
  for (const char* global :
       {"os\nsystem\n", "builtins\neval\n", "posix\nsystem\n", "torch\nload\n",
        "torch._utils\n_rebuild_tensor_v2x\n", "torch._utils\n_rebuild_parameter\n",
        "collections\nOrderedDict.fromkeys\n", "torch.FloatStorage\n\n"}) {
    EXPECT_THAT(ErrorOf(std::string("c") + global + "."), HasSubstr("is not allowed")) << global;
  }
  EXPECT_THAT(ErrorOf("c" + std::string(1000, 'x')), HasSubstr("GLOBAL without end of line"));
}

TEST(TorchPickle, GlobalsAreNotValuesAndNotCallable) {
  EXPECT_THAT(ErrorOf("ccollections\nOrderedDict\n."), HasSubstr("a global is not a value"));
  EXPECT_THAT(ErrorOf(kBytes32 + "."), HasSubstr("a storage is not a value"));
  EXPECT_THAT(ErrorOf("ccollections\nOrderedDict\n(Nt"
                      "R."),
              HasSubstr("OrderedDict with arguments"));
  EXPECT_THAT(ErrorOf("ctorch\nFloatStorage\n)R."), HasSubstr("makes no value"));
  EXPECT_THAT(ErrorOf("N)R."), HasSubstr("makes no value"));
  EXPECT_THAT(ErrorOf("ccollections\nOrderedDict\nNR."), HasSubstr("without a tuple"));
  EXPECT_THAT(ErrorOf("}}b."), HasSubstr("BUILD of something other"));
  EXPECT_THAT(ErrorOf("ccollections\nOrderedDict\n)RNb."), HasSubstr("BUILD of something other"));
  EXPECT_TRUE(Parse("ccollections\nOrderedDict\n)R}b.")->AsDict()->items.empty());
}

TEST(TorchPickle, TypedAndUntypedStorages) {
  const std::string rest = Code("K\2K\3\x85K\1\x85\x89}");
  EXPECT_THAT(*ToIntVector(Parse(kV2 + kBytes32 + rest + "tR.")->AsTensor()->View("t")),
              ElementsAre(2, 3, 4));
  EXPECT_THAT(*ToIntVector(Parse(kV2 + kUntyped32 + rest + "tR.")->AsTensor()->View("t")),
              ElementsAre(2, 3, 4));
  const auto v3 = Parse(kV3 + kUntyped32 + rest + "ctorch\nuint16\ntR.");
  ASSERT_TRUE(v3.has_value()) << MessageOf(v3);
  EXPECT_EQ(v3->AsTensor()->dtype, DType::kU16);
  EXPECT_THAT(*ToIntVector(v3->AsTensor()->View("t")), ElementsAre(0x0504, 0x0706, 0x0908));
  EXPECT_THAT(ErrorOf(kV3 + kUntyped32 + rest + "NtR."), HasSubstr("without a dtype"));
  EXPECT_THAT(ErrorOf(kV3 + kUntyped32 + rest + "tR."), HasSubstr("rebuilt from 6 arguments"));
}

TEST(TorchPickle, TensorsStayInsideTheirStorage) {
  const auto error = [](const std::string& geometry) {
    return ErrorOf(kV2 + kBytes32 + geometry + "\x89}tR.");
  };
  EXPECT_EQ(error(Code("K\0K\x20\x85K\1\x85")), "ok");
  EXPECT_EQ(error(Code("K\x1f))")), "ok");  // a scalar, the last byte
  EXPECT_THAT(error(Code("K\x20))")), HasSubstr("leaves its storage '0' of 32 elements"));
  EXPECT_EQ(error(Code("K\x20K\0\x85K\1\x85")), "ok");  // empty, at the end
  EXPECT_THAT(error(Code("K\x21K\0\x85K\1\x85")), HasSubstr("leaves its storage"));
  EXPECT_THAT(error(Code("K\0K\x21\x85K\1\x85")),
              HasSubstr("size [33], stride [1], offset 0 leaves"));
  EXPECT_THAT(error(Code("K\1K\x20\x85K\1\x85")), HasSubstr("leaves its storage"));
  EXPECT_THAT(error(Code("K\0K\2\x85K\x20\x85")), HasSubstr("leaves its storage"));
  EXPECT_THAT(error(Code("K\0K\3\x85\x8a\10\0\0\0\0\0\0\0\x40\x85")),
              HasSubstr("leaves its storage"));
  EXPECT_THAT(error(Code("K\0(K\2K\2K\2t(K\x10K\x10K\x10t")), HasSubstr("leaves its storage"));
  EXPECT_THAT(error(Code("K\0K\2\x85J\xff\xff\xff\xff\x85")), HasSubstr("not a natural number"));
  EXPECT_THAT(error(Code("J\xff\xff\xff\xffK\2\x85K\1\x85")), HasSubstr("valid offset"));
  EXPECT_THAT(error(Code("K\0K\2\x85)")), HasSubstr("different lengths"));
  EXPECT_THAT(error(Code("K\0(\x8a\10\0\0\0\0\0\0\0\x40K\4t(K\0K\0t")), HasSubstr("overflows"));
  EXPECT_THAT(error(Code("K\0(\x8a\5\0\0\0\0\1t(K\0t")), HasSubstr("out of proportion"));
}

TEST(TorchPickle, StorageErrorsNameThePlace) {
  std::string other = kBytes32;
  other[other.find("0X")] = '7';
  const std::string tensor = kV2 + other + Code("K\0K\1\x85K\1\x85\x89}tR");
  const auto value = Parse(Code("}X\6\0\0\0layers}K\3") + tensor + "ss.");
  ASSERT_FALSE(value.has_value());
  EXPECT_EQ(value.error().message(), "p: at 'layers/3': no such storage");
  EXPECT_EQ(value.error().code(), StatusCode::kNotFound);
}

// A list that holds itself, and lists of lists of lists: small pickles of endless values.
TEST(TorchPickle, CyclesAndExplosions) {
  EXPECT_THAT(ErrorOf(Code("]q\0h\0a.")), HasSubstr("nested deeper than 64"));
  std::string nested = "N";
  for (int i = 0; i < 100000; ++i) nested += '\x85';
  EXPECT_THAT(ErrorOf(nested + "."), HasSubstr("nested deeper than 64"));
  // Each of 20 lists holds its predecessor ten times: 10^20 values in 500 bytes.
  std::string lists = "(](NNNNNNNNNNe";
  for (int i = 0; i < 20; ++i) {
    lists += Code("q\0](");
    for (int j = 0; j < 10; ++j) lists += Code("h\0");
    lists += "e";
  }
  EXPECT_THAT(ErrorOf(lists + "t."), HasSubstr("the tree has more than"));
  // One long string, referred to again and again.
  std::string text = "](" + Code("X\0\x10\0\0") + std::string(4096, 'x') + Code("q\0");
  for (int i = 0; i < 5000; ++i) text += Code("h\0");
  EXPECT_THAT(ErrorOf(text + "e."), HasSubstr("the tree has more than"));
}

TEST(TorchPickle, LimitsOnTheWay) {
  TorchLimits limits;
  limits.max_values = 100;
  EXPECT_THAT(MessageOf(Parse("(" + std::string(101, 'N') + "t.", limits)),
              HasSubstr("more than 100 values"));
  std::string memo = "N";
  for (int i = 0; i < 101; ++i) memo += Code("r\0\0\0") + static_cast<char>(i);
  EXPECT_THAT(MessageOf(Parse(memo + ".", limits)), HasSubstr("memo too large"));
  EXPECT_THAT(ErrorOf("N" + std::string((1 << 20) + 1, '(') + "."), HasSubstr("too many marks"));
}

TEST(TorchPickle, PersistentIdsAreChecked) {
  for (const std::string& id : {std::string("N"), std::string(")"), Code("(NNNNNt"),
                                Code("(X\7\0\0\0storageNX\1\0\0\0"
                                     "0X\3\0\0\0cpuK t"),
                                Code("(X\7\0\0\0garbagectorch\nByteStorage\nX\1\0\0\0"
                                     "0X\3\0\0\0cpuK t"),
                                Code("(X\7\0\0\0storagectorch\nuint8\nX\1\0\0\0"
                                     "0X\3\0\0\0cpuK t")}) {
    EXPECT_THAT(ErrorOf(id + "Q."), HasSubstr("persistent id is not")) << id;
  }
  EXPECT_THAT(ErrorOf(Code("(X\7\0\0\0storagectorch\nLongStorage\nX\1\0\0\0"
                           "0X\3\0\0\0cpu"
                           "\x8a\10\0\0\0\0\0\0\0\x40tQ.")),
              HasSubstr("storage of 4611686018427387904 elements"));
  EXPECT_THAT(ErrorOf(Code("(X\7\0\0\0storagectorch\nLongStorage\nX\1\0\0\0"
                           "0X\3\0\0\0cpuJ\xff\xff\xff\xfftQ.")),
              HasSubstr("storage of -1 elements"));
}

}  // namespace
}  // namespace oscar
