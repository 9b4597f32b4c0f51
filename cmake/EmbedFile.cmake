# cmake '-DINPUT=file[|file...]' -DOUTPUT=file.cc -DHEADER=module/x.h -DNAMESPACE=a::b -DFUNCTION=Name -P EmbedFile.cmake
# Writes a function that returns the bytes of INPUT, files one after another.
string(REPLACE "|" ";" INPUT "${INPUT}")
set(hex "")
foreach(file ${INPUT})
  file(READ ${file} more HEX)
  string(APPEND hex "${more}")
endforeach()
string(REGEX REPLACE "(..)" "0x\\1," bytes "${hex}")
string(REGEX REPLACE "(................................................................................)" "\\1\n" bytes "${bytes}")
file(WRITE ${OUTPUT} "#include \"${HEADER}\"\n
namespace ${NAMESPACE} {\n
std::string_view ${FUNCTION}() {
  static constexpr unsigned char kBytes[] = {\n${bytes}};
  return {reinterpret_cast<const char*>(kBytes), sizeof(kBytes)};
}\n
}  // namespace ${NAMESPACE}\n")
