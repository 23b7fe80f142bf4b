//! A folder that belongs to one server at a time, and its files.

use crate::error::{Error, Result};
use farcell_sys::fork::{self, Generation};
use rustix::fs::{
    AtFlags, FlockOperation, Mode, OFlags, flock, fsync, open, openat, renameat, statfs, unlinkat,
};
use rustix::io::Errno;
use std::fs::{DirBuilder, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};

/// Names the process that uses the folder, which holds a lock on it.
const LOCK: &str = "lock";

/// `f_type` of tmpfs, from statfs(2).
const TMPFS: u64 = 0x0102_1994;

/// File systems by their `f_type`, from statfs(2) and linux/magic.h.
const FILE_SYSTEMS: [(u64, &str); 15] = [
    (TMPFS, "tmpfs"),
    (0xef53, "ext4"),
    (0x5846_5342, "xfs"),
    (0x9123_683e, "btrfs"),
    (0x794c_7630, "overlayfs"),
    (0x6969, "nfs"),
    (0xff53_4d42, "cifs"),
    (0x0102_1997, "9p"),
    (0x6573_5546, "fuse"),
    (0x2fc1_2fc1, "zfs"),
    (0x0bd0_0bd0, "lustre"),
    (0x4750_4653, "gpfs"),
    (0xf2f5_2010, "f2fs"),
    (0x9584_58f6, "hugetlbfs"),
    (0x8584_58f6, "ramfs"),
];

/// A folder, locked.
#[derive(Debug)]
pub struct Folder {
    path: PathBuf,
    fd: OwnedFd,
    _lock: Lock,
}

/// The locked file. A process that is forked from this one shares the lock
/// (flock(2)), and would hold it for as long as it lives: so it is given back, and
/// not only closed.
#[derive(Debug)]
struct Lock {
    file: File,
    generation: Generation,
}

impl Drop for Lock {
    fn drop(&mut self) {
        if fork::generation() == self.generation {
            // Nobody can be told, and with the last descriptor it goes in any case.
            let _ = flock(&self.file, FlockOperation::Unlock);
        }
    }
}

/// A refusal that names the file.
pub fn refused(path: &Path, what: impl Into<String>) -> Error {
    Error::State { path: path.to_owned(), what: what.into() }
}

fn failed(doing: &str, path: &Path, error: impl Into<io::Error>) -> Error {
    Error::os(format!("{doing} {}", path.display()), error.into())
}

impl Folder {
    /// Opens the folder, which is made if it does not exist, and locks it until
    /// the value is dropped. With `in_memory` it must be on tmpfs.
    ///
    /// # Errors
    /// [`Error::State`]: not on tmpfs, no folder, somebody else's, open to
    /// others, or in use; [`Error::Os`].
    pub fn open(path: &Path, in_memory: bool) -> Result<Folder> {
        if in_memory {
            check_file_system(path)?;
        }
        let made = DirBuilder::new().recursive(true).mode(0o700).create(path);
        made.or_else(|e| match e.kind() {
            // What it is then is looked at below.
            io::ErrorKind::AlreadyExists => Ok(()),
            _ => Err(failed("making the folder", path, e)),
        })?;
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = open(path, flags, Mode::empty()).map_err(|e| match e {
            Errno::NOTDIR | Errno::LOOP => {
                refused(path, "is no folder but a file or a symbolic link; name the folder itself")
            }
            e => failed("opening the folder", path, e),
        })?;
        let meta = std::fs::metadata(path).map_err(|e| failed("looking at", path, e))?;
        // Its files are for their owner alone; here it is about who can put
        // others in their place.
        check_owner(path, &meta, 0o022)?;
        let lock = lock_file(&fd, path)?;
        Ok(Folder { path: path.to_owned(), fd, _lock: lock })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Where a file of it is.
    pub fn file(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Opens a file for reading and writing, if there is one.
    ///
    /// # Errors
    /// [`Error::State`] for what is no file, somebody else's or open to others;
    /// [`Error::Os`].
    pub fn open_file(&self, name: &str) -> Result<Option<File>> {
        open_in(&self.fd, name, &self.file(name), OFlags::RDWR, 0o077)
    }

    /// Makes a file that its owner alone can use, in place of the one of that
    /// name.
    ///
    /// # Errors
    /// [`Error::State`] for a folder of that name; [`Error::Os`].
    pub fn make_file(&self, name: &str) -> Result<File> {
        let path = self.file(name);
        match unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::ISDIR) => {
                let what = "is a folder where farcell makes a file; move it away";
                return Err(refused(&path, what));
            }
            Err(e) => return Err(failed("removing", &path, e)),
        }
        let flags =
            OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        openat(&self.fd, name, flags, mode).map(File::from).map_err(|e| failed("making", &path, e))
    }

    /// Gives a file another name; one that has it already is replaced.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn rename(&self, from: &str, to: &str) -> Result<()> {
        renameat(&self.fd, from, &self.fd, to)
            .map_err(|e| failed("renaming a file to", &self.file(to), e))
    }

    /// Removes a file, if it is there. One that cannot be removed stays.
    pub fn remove(&self, name: &str) {
        if let Err(error) = unlinkat(&self.fd, name, AtFlags::empty())
            && error != Errno::NOENT
        {
            let path = self.file(name);
            tracing::warn!(path = %path.display(), %error, "cannot remove a file");
        }
    }

    /// Waits until the names of its files are on disk.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn sync(&self) -> Result<()> {
        fsync(&self.fd).map_err(|e| failed("writing to disk the folder", &self.path, e))
    }
}

/// Opens a file for reading, wherever it is.
///
/// # Errors
/// [`Error::State`] when there is none, for what is no file, somebody else's or
/// writable for others; [`Error::Os`].
pub fn open_alone(path: &Path) -> Result<File> {
    open_in(rustix::fs::CWD, path, path, OFlags::RDONLY, 0o022)?
        .ok_or_else(|| refused(path, "does not exist"))
}

fn open_in(
    at: impl std::os::fd::AsFd,
    name: impl rustix::path::Arg,
    path: &Path,
    flags: OFlags,
    not_for_others: u32,
) -> Result<Option<File>> {
    // Non-blocking: a FIFO must not keep us waiting before it is refused.
    let flags = flags | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = match openat(at, name, flags, Mode::empty()) {
        Ok(fd) => File::from(fd),
        Err(Errno::NOENT) => return Ok(None),
        Err(Errno::LOOP) => return Err(refused(path, "is a symbolic link; name the file itself")),
        Err(Errno::ISDIR | Errno::NXIO) => return Err(refused(path, "is no regular file")),
        Err(e) => return Err(failed("opening", path, e)),
    };
    let meta = file.metadata().map_err(|e| failed("looking at", path, e))?;
    if !meta.is_file() {
        return Err(refused(path, "is no regular file"));
    }
    check_owner(path, &meta, not_for_others)?;
    Ok(Some(file))
}

/// Refuses what belongs to someone else, and what others may do those things
/// with that these bits of its mode stand for.
fn check_owner(path: &Path, meta: &std::fs::Metadata, not_for_others: u32) -> Result<()> {
    let (uid, mode) = (rustix::process::geteuid().as_raw(), meta.mode() & 0o777);
    if meta.uid() != uid {
        let what = format!("belongs to user {}, and this server is user {uid}", meta.uid());
        return Err(refused(path, what));
    }
    if mode & not_for_others != 0 {
        let (shown, chmod) =
            (path.display(), if meta.is_dir() { "chmod 700" } else { "chmod 600" });
        return Err(refused(path, format!("others can use it (mode {mode:04o}): {chmod} {shown}")));
    }
    Ok(())
}

fn lock_file(fd: &OwnedFd, folder: &Path) -> Result<Lock> {
    let path = folder.join(LOCK);
    let flags = OFlags::CREATE | OFlags::RDWR | OFlags::NOFOLLOW | OFlags::NONBLOCK;
    let made = openat(fd, LOCK, flags | OFlags::CLOEXEC, Mode::RUSR | Mode::WUSR);
    made.map_err(|e| failed("opening", &path, e))?;
    let Some(mut file) = open_in(fd, LOCK, &path, OFlags::RDWR, 0o077)? else {
        return Err(refused(&path, "was removed just now; try again"));
    };
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => {}
        Err(Errno::WOULDBLOCK) => {
            let mut pid = String::new();
            // Only for the message.
            let _ = (&file).take(20).read_to_string(&mut pid);
            let by = match pid.trim().parse::<u32>() {
                Ok(pid) => format!("pid {pid}"),
                Err(_) => "another process".to_owned(),
            };
            let what = format!("is in use by {by}; stop that server, or name another folder");
            return Err(refused(folder, what));
        }
        Err(e) => return Err(failed("locking", &path, e)),
    }
    file.set_len(0)
        .and_then(|()| file.write_all(format!("{}\n", std::process::id()).as_bytes()))
        .map_err(|e| failed("writing", &path, e))?;
    Ok(Lock { file, generation: fork::generation() })
}

/// Refuses a folder, made or yet to be made, that is not on tmpfs.
fn check_file_system(path: &Path) -> Result<()> {
    let found = path
        .ancestors()
        .map(|p| if p.as_os_str().is_empty() { Path::new(".") } else { p })
        .find_map(|p| match statfs(p) {
            Ok(fs) => Some(Ok(fs.f_type as u64)),
            Err(Errno::NOENT) => None,
            Err(e) => Some(Err(failed("looking for the file system of", p, e))),
        })
        .transpose()?;
    match found {
        Some(TMPFS) => Ok(()),
        Some(other) => Err(refused(path, not_tmpfs(other))),
        None => Err(refused(path, "has no existing parent folder")),
    }
}

fn not_tmpfs(found: u64) -> String {
    let name = FILE_SYSTEMS.iter().find(|(code, _)| *code == found).map_or_else(
        || format!("a file system of type {found:#x}"),
        |(_, name)| (*name).to_owned(),
    );
    let uid = rustix::process::geteuid().as_raw();
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let there = [Some(PathBuf::from("/dev/shm")), runtime, Some(PathBuf::from("/run"))]
        .into_iter()
        .flatten()
        .find(|dir| statfs(dir).is_ok_and(|fs| fs.f_type as u64 == TMPFS));
    let instead = match there {
        Some(dir) => format!("for example {}", dir.join(format!("farcell-{uid}")).display()),
        None => "none is mounted in the usual places: mount -t tmpfs tmpfs FOLDER".to_owned(),
    };
    format!(
        "is on {name}; the cells must be in memory that an adapter can be given, so it must be a folder on tmpfs, {instead}; --snapshot writes copies to any file system"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_does_not_keep_the_folder() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("state");
        let folder = Folder::open(&path, true).unwrap();
        // What a child inherits: a second descriptor of the same open file.
        let _child = folder._lock.file.try_clone().unwrap();
        assert!(Folder::open(&path, true).is_err());
        drop(folder);
        Folder::open(&path, true).unwrap();
    }
}
