"""What a machine boots: a kernel of the distribution and an initramfs.

Everything is kept in the cache under the kernel's version and a fingerprint of
what goes into the initramfs, and is put in place with one rename, so that an
interrupted run leaves nothing half made.
"""

import collections
import glob
import hashlib
import json
import lzma
import os
import platform
import re
import shutil
import stat
import subprocess
import tempfile
import zlib

from . import host
from .host import Failure, run, say

GUEST = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(__file__))), "guest")

# Loaded at boot, in this order. A module that is built in is no error.
MODULES = [
    "virtio_pci", "virtio_console", "virtio_net", "9pnet_virtio", "9p", "overlay", "dummy", "veth",
    "ib_uverbs", "rdma_ucm", "rdma_rxe",
]
# `dummy` would make a device of its own.
OPTIONS = {"dummy": "numdummies=0"}
# Loaded at boot where the kernel has them: before Linux 6.14 rdma_rxe asks the
# crypto layer for "crc32" and `rdma link add` fails without.
WANTED = ["crc32_generic", "crc32_pclmul"]
# On the machine for whoever asks: traffic control, firewalls, and the other
# software RDMA device. The kernel loads them by itself when they are used.
ON_DEMAND = [
    "sch_netem", "sch_tbf", "sch_prio", "sch_htb", "sch_ingress", "sch_fq", "sch_fq_codel",
    "cls_u32", "cls_flower", "cls_matchall", "cls_basic", "act_gact", "act_mirred", "ifb",
    "nf_tables", "nft_compat", "nft_ct", "nft_reject_inet", "nft_counter", "ip_tables", "ip6_tables",
    "iptable_filter", "ip6table_filter", "xt_tcpudp", "xt_multiport", "xt_statistic", "xt_conntrack",
    "xt_comment", "ipt_REJECT", "bridge", "macvlan", "8021q", "tun", "siw", "rdma_cm", "virtio_rng",
]
APPLETS = [
    "sh", "basename", "cat", "chroot", "cp", "cut", "dmesg", "echo", "env", "grep", "head",
    "hostname", "insmod", "kill", "ln", "ls", "mkdir", "mkfifo", "modprobe", "mount", "mv", "nc",
    "printf", "readlink", "reboot", "rm", "sed", "setsid", "sleep", "stty", "sync", "tail",
    "test", "[", "tr", "umount", "uname",
]

Boot = collections.namedtuple("Boot", "version kernel initrd")
Source = collections.namedtuple("Source", "name packages directory")


# --- which kernel ---------------------------------------------------------------

def apt_fields(package):
    """The newest version and dependencies of a package, or None."""
    result = run("apt-cache", "show", "--no-all-versions", package, check=False)
    fields = dict(re.findall(r"^(Version|Depends): (.*)$", result.stdout, re.M))
    return fields if result.returncode == 0 and "Version" in fields else None


def kernel_packages(meta):
    """The packages with the kernel and all its modules: [(name, version)]."""
    found = {}
    queue = [meta]
    while queue:
        package = queue.pop(0)
        fields = apt_fields(package)
        if not fields or package in found:
            continue
        found[package] = fields["Version"]
        for names in re.split(r"\s*[,|]\s*", fields.get("Depends", "")):
            name = names.split(" ")[0]
            if re.match(r"linux-(image|modules|modules-extra)-[0-9]", name):
                queue.append(name)
        release = re.match(r"linux-image-(?:unsigned-)?([0-9].*)", package)
        if release:
            queue.append(f"linux-modules-extra-{release.group(1)}")
    return [(name, version) for name, version in found.items() if re.search(r"-[0-9]", name)]


def distribution_source():
    """The kernel that this distribution offers today, or None."""
    if not host.has_apt():
        return None
    for meta in ("linux-image-amd64", "linux-image-generic"):
        packages = kernel_packages(meta)
        images = [(name, version) for name, version in packages if name.startswith("linux-image")]
        if images:
            name, version = images[0]
            release = re.sub(r"^linux-image-(unsigned-)?", "", name)
            return Source(f"{release}_{version.replace(':', '.')}", packages, None)
    return None


def remembered_distribution_source():
    """The same, asked again only when the package lists have changed: apt is slow."""
    try:
        stamp = str(os.stat("/var/lib/apt/lists").st_mtime_ns)
    except OSError:
        return distribution_source()
    memory = os.path.join(host.cache_directory(), "offer.json")
    try:
        with open(memory) as handle:
            known = json.load(handle)
        if known["stamp"] == stamp:
            return Source(known["name"], [tuple(package) for package in known["packages"]], None)
    except (OSError, ValueError, KeyError):
        pass
    source = distribution_source()
    if source:
        host.replace_file(memory, json.dumps({"stamp": stamp, "name": source.name, "packages": source.packages}))
    return source


def has_rxe(tree, release):
    pattern = os.path.join(tree, "lib/modules", release, "**", "rdma_rxe.ko*")
    return bool(glob.glob(pattern, recursive=True))


def find_image(tree, release):
    for name in (f"lib/modules/{release}/vmlinuz", f"boot/vmlinuz-{release}"):
        path = os.path.join(tree, name)
        if os.access(path, os.R_OK):
            return path
    return None


def directory_source(tree):
    """A kernel that lies unpacked in a directory: boot/vmlinuz-V, lib/modules/V."""
    releases = [os.path.basename(path.rstrip("/")) for path in
                glob.glob(os.path.join(tree, "lib/modules/*/"))]
    for release in sorted(releases, reverse=True):
        if find_image(tree, release) and has_rxe(tree, release):
            stamp = int(os.stat(os.path.join(tree, "lib/modules", release)).st_mtime)
            return Source(f"{release}_{stamp}", None, (tree, release))
    return None


def choose_source(kernel):
    if kernel:
        source = directory_source(kernel)
        if not source:
            raise Failure(f"{kernel}: no boot/vmlinuz-VERSION (or lib/modules/VERSION/vmlinuz) that can "
                          "be read, with rdma_rxe below lib/modules/VERSION")
        return source
    return remembered_distribution_source() or directory_source("/")


# --- unpacking --------------------------------------------------------------------

def download(packages, directory):
    """Fetches packages as files, without installing them."""
    os.makedirs(directory, exist_ok=True)
    for name, version in packages:
        wanted = os.path.join(directory, f"{name}.deb")
        if os.path.exists(wanted):
            continue
        say(f"downloading {name} {version or ''}".rstrip())
        with tempfile.TemporaryDirectory(dir=directory) as scratch:
            options = ["-o", "APT::Sandbox::User=root"] if os.geteuid() == 0 else []
            pinned = f"{name}={version}" if version else name
            command = ["apt-get", "-q", *options, "download", pinned]
            if run(*command, check=False, cwd=scratch).returncode != 0:
                host.apt_update()
                run(*command, cwd=scratch)
            os.rename(glob.glob(os.path.join(scratch, "*.deb"))[0], wanted)


def unpack(directory, tree):
    for package in sorted(glob.glob(os.path.join(directory, "*.deb"))):
        run("dpkg-deb", "-x", package, tree)
    # Where a distribution has merged /usr, its packages may name either place.
    for have, other, target in (("usr/lib/modules", "lib", "usr/lib"), ("lib/modules", "usr/lib/modules", "../../lib/modules")):
        path = os.path.join(tree, other)
        if os.path.isdir(os.path.join(tree, have)) and not os.path.lexists(path):
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.symlink(target, path)


def is_static(program):
    """True for an ELF file that asks for no interpreter."""
    with open(program, "rb") as handle:
        return handle.read(4) == b"\x7fELF" and b"/ld-linux" not in handle.read()


def static_busybox(tree):
    for path in (os.path.join(tree, "bin/busybox"), os.path.join(tree, "usr/bin/busybox"),
                 host.find("busybox"), host.find("busybox.static")):
        if path and os.path.exists(path) and is_static(path):
            return path
    raise Failure("no statically linked busybox: install one (Debian and Ubuntu: busybox-static)")


def decompressed(path):
    with open(path, "rb") as handle:
        data = handle.read()
    if path.endswith(".xz"):
        return lzma.decompress(data)
    if path.endswith(".gz"):
        return zlib.decompress(data, 31)
    if path.endswith(".zst"):
        return filtered(["zstd", "-qdc"], data)
    return data


def filtered(command, data):
    program = host.find(command[0])
    if not program:
        raise Failure(f"{command[0]} is needed to unpack this kernel; install it")
    return subprocess.run([program, *command[1:]], input=data, stdout=subprocess.PIPE, check=True).stdout


def plain_kernel(image):
    """The ELF file inside a bzImage, or None.

    Booted through its PVH entry it spares the machine the decompression, which
    takes seconds under emulation.
    """
    with open(image, "rb") as handle:
        data = handle.read()
    if data[0x202:0x206] != b"HdrS":
        return None
    start = (data[0x1F1] + 1) * 512 + int.from_bytes(data[0x248:0x24C], "little")
    payload = data[start:start + int.from_bytes(data[0x24C:0x250], "little")]
    try:
        if payload.startswith(b"\xfd7zXZ"):
            kernel = lzma.LZMADecompressor().decompress(payload)
        elif payload.startswith(b"\x1f\x8b"):
            kernel = zlib.decompressobj(31).decompress(payload)
        elif payload.startswith(b"\x28\xb5\x2f\xfd"):
            kernel = filtered(["zstd", "-qdc"], payload[:-4])
        elif payload.startswith(b"\x02\x21\x4c\x18"):
            kernel = filtered(["lz4", "-qdc"], payload[:-4])
        else:
            return None
    except (Failure, OSError, lzma.LZMAError, zlib.error, subprocess.CalledProcessError):
        return None
    # The note of type 18 from "Xen" holds the 32-bit entry point.
    has_entry = kernel.startswith(b"\x7fELF") and b"\x04\0\0\0\x08\0\0\0\x12\0\0\0Xen\0" in kernel
    return kernel if has_entry else None


# --- the initramfs ------------------------------------------------------------------

class Archive:
    """An initramfs: a cpio archive in the "newc" form."""

    def __init__(self):
        self.parts = []
        self.directories = set()
        self.inode = 0

    def add(self, name, mode, content=b""):
        self.inode += 1
        header = "070701" + "".join(f"{field:08x}" for field in (
            self.inode, mode, 0, 0, 1, 0, len(content), 0, 0, 0, 0, len(name) + 1, 0))
        entry = header.encode() + name.encode() + b"\0"
        self.parts += [entry, b"\0" * (-len(entry) % 4), content, b"\0" * (-len(content) % 4)]

    def parents(self, name):
        directory = os.path.dirname(name)
        if directory and directory not in self.directories:
            self.parents(directory)
            self.directories.add(directory)
            self.add(directory, stat.S_IFDIR | 0o755)

    def directory(self, name):
        self.parents(name + "/")

    def file(self, name, content, mode=0o644):
        self.parents(name)
        self.add(name, stat.S_IFREG | mode, content)

    def link(self, name, target):
        self.parents(name)
        self.add(name, stat.S_IFLNK | 0o777, target.encode())

    def bytes(self):
        self.add("TRAILER!!!", 0)
        return b"".join(self.parts)


def module_files(tree, release, name):
    """The files of a module and of what it needs, first what loads first."""
    result = run("modprobe", "-d", tree, "-S", release, "--ignore-install", "--show-depends", name, check=False)
    if result.returncode != 0:
        return None
    return [line.split()[1] for line in result.stdout.splitlines() if line.startswith("insmod ")]


def build_initramfs(tree, release, modules_tree):
    archive = Archive()
    for name in ("proc", "sys", "dev", "tmp"):
        archive.directory(name)
    archive.add("dev/console", stat.S_IFCHR | 0o600)  # devtmpfs covers it; major and minor do not matter
    with open(static_busybox(tree), "rb") as handle:
        archive.file("bin/busybox", handle.read(), 0o755)
    for applet in APPLETS:
        archive.link(f"bin/{applet}", "busybox")
    archive.link("sbin", "bin")  # the kernel calls /sbin/modprobe

    if not os.path.exists(os.path.join(modules_tree, "lib/modules", release, "modules.dep.bin")):
        run("depmod", "-b", modules_tree, release)
    base = os.path.join(modules_tree, "lib/modules", release)
    order = {}
    for name in MODULES + WANTED + ON_DEMAND:
        files = module_files(modules_tree, release, name)
        if files is None and name in MODULES:
            raise Failure(f"kernel {release} has no module {name}")
        for path in files or []:
            relative = re.sub(r"\.(xz|gz|zst)$", "", os.path.relpath(path, base))
            order.setdefault(relative, (path, name in MODULES + WANTED, OPTIONS.get(name, "")
                                        if os.path.basename(relative).startswith(name + ".") else ""))
    boot = [f"{name} {options}".rstrip() for name, (_, at_boot, options) in order.items() if at_boot]
    archive.file("etc/modules", ("\n".join(boot) + "\n").encode())

    # The machine's own index, for the modules that are loaded on demand.
    with tempfile.TemporaryDirectory(prefix="build-", dir=host.cache_directory()) as scratch:
        inside = os.path.join(scratch, "lib/modules", release)
        os.makedirs(inside)
        for relative, (path, _, _) in order.items():
            target = os.path.join(inside, relative)
            os.makedirs(os.path.dirname(target), exist_ok=True)
            with open(target, "wb") as handle:
                handle.write(decompressed(path))
        for name in ("modules.builtin", "modules.builtin.modinfo", "modules.order"):
            path = os.path.join(base, name)
            if os.path.exists(path):
                shutil.copy(path, inside)
        run("depmod", "-b", scratch, release)
        for directory, _, names in sorted(os.walk(inside)):
            for name in sorted(names):
                path = os.path.join(directory, name)
                with open(path, "rb") as handle:
                    archive.file(os.path.relpath(path, scratch), handle.read())

    for path in guest_files():
        name = os.path.relpath(path, GUEST)
        with open(path, "rb") as handle:
            archive.file("init" if name == "init" else f"guest/{name}", handle.read(),
                         0o755 if os.access(path, os.X_OK) else 0o644)
    return archive.bytes()


def guest_files():
    return sorted(path for path in glob.glob(os.path.join(GUEST, "**"), recursive=True) if os.path.isfile(path))


def fingerprint():
    digest = hashlib.sha256()
    for path in [*guest_files(), os.path.realpath(__file__)]:
        with open(path, "rb") as handle:
            digest.update(hashlib.sha256(handle.read()).digest())
    return digest.hexdigest()[:12]


# --- the cache ------------------------------------------------------------------------

def from_cache(path):
    kernel = next((os.path.join(path, name) for name in ("vmlinux", "vmlinuz")
                   if os.path.exists(os.path.join(path, name))), None)
    initrd = os.path.join(path, "initrd")
    if kernel and os.path.exists(initrd):
        os.utime(path)
        return Boot(os.path.basename(path), kernel, initrd)
    return None


def build(source, path):
    cache = host.cache_directory()
    for left in glob.glob(os.path.join(cache, "build-*")):  # by one that was killed
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache) as scratch:
        tree = os.path.join(scratch, "tree")
        os.makedirs(tree)
        release = source.name.split("_")[0]
        if source.packages:
            directory = os.path.join(cache, "packages", source.name)
            # busybox comes with the kernel, so that none need be installed.
            download([*source.packages, ("busybox-static", None)], directory)
            say(f"unpacking kernel {release}")
            unpack(directory, tree)
            modules_tree, image = tree, find_image(tree, release)
        else:
            modules_tree, release = source.directory
            image = find_image(modules_tree, release)
        if not image or not has_rxe(modules_tree, release):
            raise Failure(f"kernel {release}: no image, or no rdma_rxe in its packages")
        ready = os.path.join(scratch, "boot")
        os.makedirs(ready)
        with open(os.path.join(ready, "initrd"), "wb") as handle:
            handle.write(build_initramfs(tree, release, modules_tree))
        kernel = plain_kernel(image)
        if kernel:
            with open(os.path.join(ready, "vmlinux"), "wb") as handle:
                handle.write(kernel)
        else:
            shutil.copy(image, os.path.join(ready, "vmlinuz"))
        shutil.rmtree(path, ignore_errors=True)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.rename(ready, path)


def prune(directory, keep):
    entries = sorted((entry for entry in glob.glob(os.path.join(directory, "*"))), key=os.path.getmtime)
    for entry in entries[:-keep]:
        shutil.rmtree(entry, ignore_errors=True)


def newest_cached():
    mark = fingerprint()
    entries = glob.glob(os.path.join(host.cache_directory(), "boot", f"*-{mark}"))
    for entry in sorted(entries, key=os.path.getmtime, reverse=True):
        boot = from_cache(entry)
        if boot:
            return boot
    return None


def prepare(kernel=None, install=True):
    """Kernel and initramfs, from the cache or built now."""
    if platform.machine() != "x86_64":
        raise Failure(f"this machine is {platform.machine()}: the virtual machines are x86-64 only, "
                      "since they run the host's own programs")
    source = choose_source(kernel)
    if not source:
        boot = newest_cached()
        if boot:
            return boot
        if not host.has_apt():
            raise Failure(
                "no kernel with rdma_rxe: neither apt nor a readable /lib/modules/*/vmlinuz with the module. "
                "Unpack a distribution's kernel and modules packages in a directory and pass --kernel DIR")
        if not install:
            raise Failure("the package lists offer no kernel; run: sudo apt-get update")
        host.apt_update()
        source = distribution_source()
        if not source:
            raise Failure("the package lists offer neither linux-image-amd64 nor linux-image-generic")
    path = os.path.join(host.cache_directory(), "boot", f"{source.name}-{fingerprint()}")
    boot = from_cache(path)
    if boot:
        return boot
    with host.cache_lock():
        boot = from_cache(path)
        if boot:
            return boot
        try:
            build(source, path)
        except Failure as failure:
            boot = newest_cached()
            if kernel or not boot:
                raise
            say(f"warning: {failure}; going on with {boot.version} from the cache")
            return boot
        prune(os.path.dirname(path), 4)
        prune(os.path.join(host.cache_directory(), "packages"), 2)
    return from_cache(path)
