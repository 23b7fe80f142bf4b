//! Lists that a server sends.

/// The arrays and the peers that any bytes are.
pub(crate) fn lists(bytes: &[u8]) {
    if let Some(arrays) = super::read_list(bytes) {
        assert!(arrays.len() <= bytes.len());
    }
    if let Some(members) = super::peers::read_members(bytes) {
        assert!(members.iter().map(|m| m.holds.len() + 1).sum::<usize>() <= bytes.len());
    }
}
