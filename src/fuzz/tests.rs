//! Every input that is kept in `fuzz/corpus` once more, on any toolchain, and
//! some noise.

use proptest::prelude::*;
use std::path::PathBuf;

type Target = fn(&[u8]);

const TARGETS: [(&str, Target); 7] = [
    ("frames", super::frames),
    ("handshake", super::handshake),
    ("memory", super::memory),
    ("names", super::names),
    ("replies", super::replies),
    ("sealed", super::sealed),
    ("snapshot", super::snapshot),
];

#[test]
fn every_kept_input_does_what_is_promised() {
    for (name, target) in TARGETS {
        let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/corpus").join(name);
        let mut files = 0;
        for file in std::fs::read_dir(&folder).expect("a folder of inputs for each target") {
            let path = file.unwrap().path();
            // Shown when the test fails: which one it was.
            println!("{}", path.display());
            target(&std::fs::read(path).unwrap());
            files += 1;
        }
        assert!(files > 0, "no inputs for {name}");
    }
}

#[test]
fn fuzz_has_a_program_for_each_target() {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("fuzz/fuzz_targets");
    let files = std::fs::read_dir(folder).unwrap().map(|f| f.unwrap().file_name());
    let mut names: Vec<String> = files.map(|f| f.to_string_lossy().replace(".rs", "")).collect();
    names.sort();
    assert_eq!(names, TARGETS.map(|(name, _)| name));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn noise_does_what_is_promised(
        which in 0..TARGETS.len(),
        data in prop::collection::vec(prop_oneof![Just(0u8), 0u8..40, any::<u8>()], 0..400),
    ) {
        TARGETS[which].1(&data);
    }
}
