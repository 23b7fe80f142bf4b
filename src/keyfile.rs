//! Key files: where they are, and which are refused.

use crate::auth::{Key, KeyError, MAX_KEY};
use crate::error::{Error, Result};
use rustix::fs::OFlags;
use std::fs::OpenOptions;
use std::io::{self, Read, Write};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Names a key file.
pub const ENV_KEY_FILE: &str = "FARCELL_AUTHKEY_FILE";

/// Where the key of this user is: `farcell/authkey` in `$XDG_CONFIG_HOME`, or
/// in `~/.config`. On a cluster with a shared home all nodes find it there.
///
/// # Errors
/// Neither variable is set.
pub fn default_path() -> Result<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|v| !v.is_empty()).map(PathBuf::from);
    set("XDG_CONFIG_HOME")
        .or_else(|| set("HOME").map(|home| home.join(".config")))
        .map(|dir| dir.join("farcell").join("authkey"))
        .ok_or_else(|| Error::BadSetting {
            what: format!(
                "no key file: neither HOME nor XDG_CONFIG_HOME is set; name one with {ENV_KEY_FILE}"
            ),
        })
}

/// The key file that the environment names, or the user's own.
///
/// # Errors
/// As [`default_path`].
pub fn path_from_env() -> Result<PathBuf> {
    match std::env::var_os(ENV_KEY_FILE).filter(|v| !v.is_empty()) {
        Some(path) => Ok(path.into()),
        None => default_path(),
    }
}

/// Reads a key file: its bytes are the key, a newline at their end left out.
///
/// # Errors
/// [`Error::KeyFile`] when it is missing, empty, too long, no file, not
/// readable, or readable for others than its owner.
pub fn load(path: &Path) -> Result<Key> {
    let bad = |what: String| Error::KeyFile { path: path.to_owned(), what };
    let shown = path.display();
    // Non-blocking: a FIFO must not keep us waiting before it is refused.
    let flags = OFlags::NONBLOCK.bits() as i32;
    let opened = OpenOptions::new().read(true).custom_flags(flags).open(path);
    let file = opened.map_err(|e| match e.kind() {
        io::ErrorKind::NotFound => bad(format!(
            "does not exist; copy the server's key file there, or make one: (umask 077; head -c 32 /dev/urandom > {shown})"
        )),
        io::ErrorKind::PermissionDenied => bad("permission denied; it belongs to someone else".to_owned()),
        _ => bad(e.to_string()),
    })?;
    let meta = file.metadata().map_err(|e| bad(e.to_string()))?;
    if !meta.is_file() {
        return Err(bad("is no regular file".to_owned()));
    }
    let mode = meta.mode() & 0o777;
    if mode & 0o077 != 0 {
        return Err(bad(format!("others can use it (mode {mode:04o}): chmod 600 {shown}")));
    }
    let mut bytes = Vec::new();
    file.take(MAX_KEY as u64 + 3).read_to_end(&mut bytes).map_err(|e| bad(e.to_string()))?;
    if bytes.ends_with(b"\n") {
        bytes.pop();
        if bytes.ends_with(b"\r") {
            bytes.pop();
        }
    }
    Key::new(bytes).map_err(|e| match e {
        KeyError::Empty => bad(format!(
            "is empty; copy the server's key there, or make a new one: head -c 32 /dev/urandom > {shown}"
        )),
        KeyError::TooLong => bad(format!("holds more than {MAX_KEY} bytes; is it a key at all?")),
    })
}

/// Reads the key file, or makes one with a new random key that its owner alone
/// can read. `true`: it is new. Of several processes that do this at once one
/// makes the key and all get the same.
///
/// # Errors
/// As [`load`], and [`Error::KeyFile`] when it cannot be written.
pub fn load_or_create(path: &Path) -> Result<(Key, bool)> {
    let bad = |what: String| Error::KeyFile { path: path.to_owned(), what };
    if std::fs::symlink_metadata(path).is_ok() {
        return Ok((load(path)?, false));
    }
    let dir = path.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(dir)
        .map_err(|e| bad(format!("cannot make the folder {}: {e}", dir.display())))?;
    let mut random = [0; 32];
    getrandom::fill(&mut random).map_err(|e| Error::os("asking for random numbers", e.into()))?;
    // As text, so that it can be copied through a terminal.
    let text: String = random.iter().map(|b| format!("{b:02x}")).collect();
    let key = Key::new(text.clone().into_bytes())
        .map_err(|why| Error::BadKey { source_name: path.display().to_string(), why })?;
    // Written whole under another name first: nobody ever reads half a key.
    let name = getrandom::u64().map_err(|e| Error::os("asking for random numbers", e.into()))?;
    let draft = dir.join(format!(".authkey.{name:016x}"));
    let made = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(&draft)
        .and_then(|mut file| {
            file.write_all(text.as_bytes())?;
            file.write_all(b"\n")?;
            file.sync_all()
        })
        // Unlike a rename, a link does not replace the key of someone who was
        // faster.
        .and_then(|()| std::fs::hard_link(&draft, path));
    // Gone or not, it hurts nobody.
    let _ = std::fs::remove_file(&draft);
    match made {
        Ok(()) => Ok((key, true)),
        Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok((load(path)?, false)),
        Err(e) => Err(bad(format!("cannot be written: {e}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{Permissions, set_permissions, write};
    use std::os::unix::fs::PermissionsExt;

    fn file(content: &[u8], mode: u32) -> (tempfile::TempDir, PathBuf) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        write(&path, content).unwrap();
        set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        (dir, path)
    }

    fn why(path: &Path) -> String {
        load(path).unwrap_err().to_string()
    }

    #[test]
    fn a_good_file_is_read_without_its_newline() {
        for content in [&b"secret"[..], b"secret\n", b"secret\r\n"] {
            let (_dir, path) = file(content, 0o600);
            assert_eq!(load(&path).unwrap().expose(), b"secret");
        }
    }

    #[test]
    fn bad_files_are_refused_with_the_fix() {
        let (dir, path) = file(b"secret", 0o640);
        assert!(why(&path).contains(&format!("chmod 600 {}", path.display())));
        let (_dir, empty) = file(b"\n", 0o600);
        assert!(why(&empty).contains("is empty"));
        let (_dir, large) = file(&[b'x'; 5000], 0o600);
        assert!(why(&large).contains("more than 4096 bytes"));
        assert!(why(&dir.path().join("none")).contains("does not exist"));
        assert!(why(dir.path()).contains("no regular file"));
        let fifo = dir.path().join("fifo");
        let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
        assert!(made.success());
        assert!(why(&fifo).contains("no regular file"));
    }

    #[test]
    fn a_new_key_is_private_and_made_once() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/authkey");
        let keys: Vec<(Key, bool)> = std::thread::scope(|s| {
            let all: Vec<_> = (0..8).map(|_| s.spawn(|| load_or_create(&path).unwrap())).collect();
            all.into_iter().map(|t| t.join().unwrap()).collect()
        });
        assert_eq!(keys.iter().filter(|(_, new)| *new).count(), 1);
        assert!(keys.iter().all(|(key, _)| key.is(&keys[0].0)));
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(std::fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }
}
