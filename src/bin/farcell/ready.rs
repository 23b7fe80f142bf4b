//! Telling a script where the server is: a file, or a file descriptor.

use crate::failure::Failure;
use crate::output::plain;
use rustix::fs::OFlags;
use rustix::io::Errno;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// A file that holds the server's address while the server is ready. It is
/// removed when dropped.
#[derive(Debug)]
pub struct ReadyFile {
    path: PathBuf,
    content: String,
    /// Whether we made the file; a device or a pipe was there before.
    ours: bool,
}

impl ReadyFile {
    /// Writes the address. Nobody ever reads half of it: an ordinary file is
    /// written under another name first.
    pub fn write(path: &Path, address: &str) -> Result<ReadyFile, Failure> {
        let content = format!("{address}\n");
        let special = std::fs::metadata(path).is_ok_and(|m| !m.is_file());
        let written = if special {
            OpenOptions::new().write(true).open(path).and_then(|f| put(f, &content))
        } else {
            replace(path, &content)
        };
        match written {
            Ok(()) => Ok(ReadyFile { path: path.to_owned(), content, ours: !special }),
            Err(e) => Err(cannot(path, &e)),
        }
    }
}

impl Drop for ReadyFile {
    fn drop(&mut self) {
        // Another server may have written its own address meanwhile.
        if self.ours && std::fs::read(&self.path).is_ok_and(|c| c == self.content.as_bytes()) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn replace(path: &Path, content: &str) -> io::Result<()> {
    let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
    let mut draft = std::ffi::OsString::from(".");
    draft.push(name);
    draft.push(format!(".{}", std::process::id()));
    let draft = path.with_file_name(draft);
    let made = File::create(&draft)
        .and_then(|file| put(file, content))
        .and_then(|()| std::fs::rename(&draft, path));
    if made.is_err() {
        let _ = std::fs::remove_file(&draft);
    }
    made
}

fn put(mut file: File, content: &str) -> io::Result<()> {
    file.write_all(content.as_bytes())
}

fn cannot(path: &Path, e: &io::Error) -> Failure {
    let todo = match e.kind() {
        io::ErrorKind::StorageFull => "; make room there or name another file",
        io::ErrorKind::NotFound => "; its folder does not exist, make it first",
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => {
            "; name a file that this user may write"
        }
        io::ErrorKind::IsADirectory => "; name a file",
        _ => "",
    };
    Failure::Other(format!("cannot write the ready file {}: {}{todo}", path.display(), plain(e)))
}

/// A file descriptor that a script has opened for us.
#[derive(Debug)]
pub struct ReadyFd {
    fd: i32,
    file: File,
}

impl ReadyFd {
    /// Takes the descriptor over. This must come before the program opens
    /// anything: the number would mean something else then.
    pub fn claim(fd: i32) -> Result<ReadyFd, Failure> {
        let bad = |why: &str| {
            Failure::Other(format!("--ready-fd {fd}: {why}; pass an open pipe, for example 3>&1"))
        };
        if fd < 3 {
            return Err(Failure::Usage(format!(
                "--ready-fd {fd}: 0, 1 and 2 have uses of their own; give 3 or more"
            )));
        }
        // Another handle to the same pipe or file, without taking the number
        // on trust. Not blocking: a pipe may have no reader any more.
        let file = OpenOptions::new()
            .append(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(format!("/proc/self/fd/{fd}"))
            .map_err(|e| match e.raw_os_error().map(Errno::from_raw_os_error) {
                Some(Errno::NOENT) => bad("this file descriptor is not open"),
                Some(Errno::NXIO) => bad("it is a socket, or a pipe that nobody reads"),
                _ => bad(&plain(&e)),
            })?;
        // The reader sees the end of the pipe when our own handle goes.
        nix::unistd::close(fd).map_err(|e| bad(e.desc()))?;
        Ok(ReadyFd { fd, file })
    }

    /// Writes the address and closes the descriptor.
    pub fn write(self, address: &str) -> Result<(), Failure> {
        let fd = self.fd;
        put(self.file, &format!("{address}\n")).map_err(|e| {
            Failure::Other(format!(
                "cannot write the address to file descriptor {fd}: {}; is its reader gone?",
                plain(&e)
            ))
        })
    }
}
