"""A hub on this machine: listing, files with redirects to a "CDN" on another port, ranges, digests,
refusals, and every fault that a network has. Faults are values of `Hub`, never a matter of time."""
import hashlib
import http.server
import json
import ssl
import threading
import urllib.parse

COMMIT = "1" * 40


def git_id(data):
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Repository:
    """Files of one commit. What is at least `lfs_from` bytes long is kept as the hub keeps large files."""

    def __init__(self, files, commit=COMMIT, lfs_from=4096):
        self.files = dict(files)
        self.commit = commit
        self.lfs_from = lfs_from

    def is_lfs(self, path):
        return len(self.files[path]) >= self.lfs_from

    def digest(self, path):
        data = self.files[path]
        return hashlib.sha256(data).hexdigest() if self.is_lfs(path) else git_id(data)


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def answer(self, status, headers=(), body=b""):
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.close_connection = True

    def do_GET(self):
        hub, role = self.server.hub, self.server.role
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        with hub.lock:
            hub.requests.append((role, self.command, self.path, dict(self.headers)))
            fault = hub.faults.pop(0) if hub.faults and hub.faults[0][0] in path else None
        if fault:
            _, status, headers, body = fault
            return self.answer(status, headers, body)
        if hub.token and role == "hub" and self.headers.get("Authorization") != f"Bearer {hub.token}":
            code = "GatedRepo" if hub.gated else "RepoNotFound"
            if "/resolve/" in path or not hub.gated:
                return self.answer(hub.refusal, {"X-Error-Code": code, "X-Error-Message": "Access is restricted"})
        if role == "cdn":
            return self.send_file(hub.cdn[path], path)
        if path.startswith("/api/v1/models/"):
            return self.modelscope(path, query)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self.api(parts, query)
        if len(parts) > 4 and parts[2] == "resolve":
            return self.resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]))
        return self.answer(404)

    def find(self, name, revision):
        commits = self.server.hub.repositories.get(name)
        if commits is None:
            self.answer(401, {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository Not Found"})
            return None
        repository = commits.get(revision) or next((r for r in commits.values() if r.commit == revision), None)
        if repository is None:
            self.answer(404, {"X-Error-Code": "RevisionNotFound", "X-Error-Message": "Invalid rev id"})
        return repository

    def api(self, parts, query):
        name = "/".join(parts[2:4])
        kind, rest = (parts[4], "/".join(parts[5:])) if len(parts) > 4 else ("revision", "main")
        revision = rest.split("/")[0] if kind == "tree" else rest
        repository = self.find(name, revision)
        if repository is None:
            return None
        hub = self.server.hub
        if hub.listing is not None:
            return self.answer(200, {"Content-Type": "application/json"}, hub.listing)
        listed = []
        for path, data in repository.files.items():
            lfs = repository.is_lfs(path)
            digest = repository.digest(path)
            blob = git_id(b"pointer to " + digest.encode()) if lfs else digest
            if kind == "tree":
                entry = {"type": "file", "path": path, "size": len(data), "oid": blob}
                if lfs:
                    entry["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 134}
            else:
                entry = {"rfilename": path}
                if query.get("blobs") and hub.blobs:
                    entry |= {"size": len(data), "blobId": blob}
                    if lfs:
                        entry["lfs"] = {"sha256": digest, "size": len(data), "pointerSize": 134}
            listed.append(entry)
        body = listed if kind == "tree" else {
            "id": name, "modelId": name, "sha": repository.commit, "private": False, "siblings": listed,
            "gated": "manual" if hub.gated else False, "tags": [], "downloads": 0}
        return self.answer(200, {"Content-Type": "application/json"}, json.dumps(body).encode())

    def resolve(self, name, revision, path):
        hub = self.server.hub
        repository = self.find(name, revision)
        if repository is None:
            return None
        head = {"X-Repo-Commit": repository.commit, "Accept-Ranges": "bytes"}
        if path not in repository.files:
            return self.answer(404, head | {"X-Error-Code": "EntryNotFound"})
        data = repository.files[path]
        digest = repository.digest(path)
        if not repository.is_lfs(path):
            return self.send_file(data, path, head | {"ETag": f'"{digest}"'})
        place = f"/{name}/{digest}"
        hub.cdn[place] = data
        location = f"{hub.cdn_url}{place}?Signature=a%2Fb%2Bc&Expires=1"
        return self.answer(302, head | {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{digest}"',
                                        "ETag": '"other"', "Location": hub.location or location})

    def modelscope(self, path, query):
        name, _, rest = path.removeprefix("/api/v1/models/").partition("/repo")
        commits = self.server.hub.repositories.get(name)
        if commits is None:
            return self.answer(404, {}, b'{"Code": 10010205001, "Data": null}')
        repository = commits[query["Revision"]]
        if rest == "/files":
            listed = [{"Type": "blob", "Path": path, "Size": len(data),
                       "Sha256": hashlib.sha256(data).hexdigest()} for path, data in repository.files.items()]
            return self.answer(200, {}, json.dumps({"Code": 200, "Data": {"Files": listed}}).encode())
        return self.send_file(repository.files[query["FilePath"]], query["FilePath"])

    def send_file(self, data, path, headers=()):
        """The bytes of a file, with the faults that concern bytes."""
        hub = self.server.hub
        start, status = 0, 200
        asked = self.headers.get("Range", "")
        if asked.startswith("bytes=") and hub.ranges:
            start = int(asked[6:].split("-")[0])
            if start >= len(data):
                return self.answer(416, {"Content-Range": f"bytes */{len(data)}"})
            status = 206
        with hub.lock:
            if hub.wrong > 0 and len(data) >= hub.faulty_from:
                hub.wrong -= 1
                data = data[:-1] + bytes([data[-1] ^ 1])
        part = data[start:]
        self.send_response(status)
        for name, value in dict(headers).items():
            self.send_header(name, value)
        if status == 206:
            shown = 0 if hub.lies_about_range else start
            self.send_header("Content-Range", f"bytes {shown}-{len(data) - 1}/{len(data)}")
        if hub.lengths:
            self.send_header("Content-Length", str(len(part)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        if self.command == "HEAD":
            return None
        if len(data) >= hub.faulty_from:
            hub.gate(path)
            part = part[:hub.cut] if hub.cut else part
            if hub.trailing:
                part = part + b"more"
            if hub.cut_total:
                with hub.lock:
                    room = max(0, hub.cut_total - hub.sent)
                    part = part[:room]
                    hub.sent += len(part)
        for at in range(0, len(part), hub.piece):
            self.wfile.write(part[at:at + hub.piece])
            self.wfile.flush()
        return None


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_):
        pass  # a client that hangs up is no news


class Hub:
    def __init__(self, certificate=None):
        """With a certificate (the path of a PEM file with its key) the hub speaks TLS; the CDN never does."""
        self.repositories = {}  # name -> {revision: Repository}
        self.requests = []
        self.lock = threading.Lock()
        self.cdn = {}
        self.faults = []  # (part of a path, status, headers, body), each for one request, in order
        self.token = None
        self.gated = False
        self.refusal = 401
        self.listing = None  # bytes in place of the listing
        self.location = None  # another target of redirects
        self.blobs = True  # the listing has sizes and digests
        self.ranges = True
        self.lies_about_range = False
        self.lengths = True
        self.faulty_from = 4096  # smaller files are spared
        self.cut = 0  # bytes after which each connection ends
        self.cut_total, self.sent = 0, 0  # bytes after which the CDN sends nothing more
        self.wrong = 0  # answers with a wrong byte
        self.trailing = False
        self.piece = 1 << 20
        self.gate = lambda path: None  # called before a large file's bytes
        self.servers = []
        for role in ("hub", "cdn"):
            server = Server(("127.0.0.1", 0), Handler)
            server.hub, server.role = self, role
            if certificate and role == "hub":
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                context.load_cert_chain(certificate)
                # The handshake belongs to the connection's own thread.
                server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
            threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
            self.servers.append(server)
        self.url, self.cdn_url = (f"http://127.0.0.1:{s.server_address[1]}" for s in self.servers)
        if certificate:
            self.url = self.url.replace("http:", "https:")

    def add(self, name, files, revision="main", **options):
        self.repositories.setdefault(name, {})[revision] = Repository(files, **options)

    def close(self):
        for server in self.servers:
            server.shutdown()
            server.server_close()

    def paths(self, role=None, command="GET"):
        with self.lock:
            return [p for r, c, p, _ in self.requests if role in (None, r) and c == command]
