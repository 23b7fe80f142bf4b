//! What a machine without RDMA, or without all of it, is told. Needs no device.

use std::process::Command;

use farcell::verbs::{self, DeviceList, Error};

/// A variable that makes this binary play the machine.
const ROLE: &str = "FARCELL_TEST_ROLE";

#[test]
fn the_program_is_not_linked_to_libibverbs() {
    let me = std::env::current_exe().unwrap();
    let bytes = std::fs::read(me).unwrap();
    // A NEEDED entry would be in the dynamic string table, ended by a zero.
    // The name that is loaded at run time is followed by other text or by the
    // zero of a C string, so the section headers have to tell.
    let needed = needed(&bytes);
    assert!(needed.iter().any(|name| name.starts_with("libc.so")), "{needed:?}");
    assert!(!needed.iter().any(|name| name.contains("ibverbs")), "{needed:?}");
}

/// The DT_NEEDED names of a 64-bit little-endian ELF file, see elf(5).
fn needed(file: &[u8]) -> Vec<String> {
    let number = |at: usize, len: usize| {
        let mut bytes = [0; 8];
        bytes[..len].copy_from_slice(&file[at..at + len]);
        usize::try_from(u64::from_le_bytes(bytes)).unwrap()
    };
    let (headers, size, count) = (number(32, 8), number(54, 2), number(56, 2));
    let segments: Vec<_> = (0..count).map(|index| headers + index * size).collect();
    let offset = |address: usize| {
        let load = segments.iter().find(|&&segment| {
            let start = number(segment + 16, 8);
            number(segment, 4) == 1 && (start..start + number(segment + 32, 8)).contains(&address)
        });
        let load = *load.expect("the address is in a loaded segment");
        address - number(load + 16, 8) + number(load + 8, 8)
    };
    let dynamic = segments.iter().find(|&&segment| number(segment, 4) == 2);
    let dynamic = number(*dynamic.expect("a dynamic program") + 8, 8);
    let entries: Vec<_> = (0..)
        .map(|index| (number(dynamic + 16 * index, 8), number(dynamic + 16 * index + 8, 8)))
        .take_while(|&(tag, _)| tag != 0)
        .collect();
    let strings = entries.iter().find(|&&(tag, _)| tag == 5).unwrap().1;
    entries
        .iter()
        .filter(|&&(tag, _)| tag == 1)
        .map(|&(_, name)| {
            let text = &file[offset(strings) + name..];
            let end = text.iter().position(|&byte| byte == 0).unwrap();
            String::from_utf8_lossy(&text[..end]).into_owned()
        })
        .collect()
}

#[test]
fn a_machine_without_a_device_is_told_what_is_missing() {
    let error = match verbs::library().and_then(DeviceList::new) {
        Ok(list) => {
            println!("NOT TESTED: this machine has {list:?}");
            return;
        }
        Err(error) => error,
    };
    println!("{error}");
    match &error {
        Error::Library(_) => assert!(error.to_string().contains("no libibverbs.so.1")),
        Error::NoDevice { reason } => assert!(!reason.is_empty()),
        other => panic!("{other}"),
    }
}

#[test]
fn a_machine_without_the_library_is_told_so() {
    if std::env::var_os(ROLE).is_some() {
        let error = verbs::library().unwrap_err();
        assert!(matches!(error, Error::Library(_)), "{error}");
        assert!(error.to_string().starts_with("cannot load libibverbs.so.1 ("), "{error}");
        return;
    }
    // A mount namespace of its own in which the library's file is covered by
    // an empty one: the loader refuses it. (A root without it: program_no_libibverbs.)
    let script = r#"
        for file in $(ldconfig -p | sed -n 's/.*libibverbs\.so\.1 .*=> //p'); do
            mount --bind /dev/null "$(readlink -f "$file")" || exit 77
        done
        exec "$0" --exact a_machine_without_the_library_is_told_so --nocapture
    "#;
    let output = Command::new("unshare")
        .args(["--mount", "--map-root-user", "sh", "-c", script])
        .arg(std::env::current_exe().unwrap())
        .env(ROLE, "without")
        .output();
    match output {
        Ok(output) if output.status.success() => {}
        Ok(output)
            if output.status.code() == Some(77)
                || output.status.code() == Some(1) && output.stdout.is_empty() =>
        {
            println!(
                "NOT TESTED: no mount namespace here: {}",
                String::from_utf8_lossy(&output.stderr)
            );
        }
        Ok(output) => panic!(
            "{}{}",
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr)
        ),
        Err(error) => println!("NOT TESTED: no unshare(1): {error}"),
    }
}
