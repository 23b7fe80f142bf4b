//! Frames and records, there and back.

use super::*;
use proptest::prelude::*;

proptest! {
    #[test]
    fn any_bytes_are_a_frame_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        match split(&bytes) {
            Ok(Some((header, payload))) => {
                prop_assert_eq!(payload.len(), header.len as usize);
                prop_assert!(bytes.len() >= HEADER + payload.len());
            }
            Ok(None) => if let Some(head) = bytes.get(..4) {
                let len = u32::from_le_bytes(head.try_into().unwrap()) as usize;
                prop_assert!(bytes.len() < HEADER + len);
            },
            Err(Violation::TooLong(n)) => prop_assert!(n as usize > MAX_PAYLOAD),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    #[test]
    fn what_is_pushed_is_split_again(id: u64, a in prop::collection::vec(any::<u8>(), 0..60), b in prop::collection::vec(any::<u8>(), 0..60), cut in 0usize..140) {
        let mut out = Vec::new();
        push(&mut out, Tag::Wait, id, &[&a, &b]);
        let (header, payload) = split(&out).unwrap().unwrap();
        prop_assert_eq!(header, Header::new(Tag::Wait, id, a.len() + b.len()));
        prop_assert_eq!(payload, [a, b].concat());
        if cut < out.len() { prop_assert_eq!(split(&out[..cut]).unwrap(), None); }
    }

    #[test]
    fn refusals_survive_the_wire(code in 0u16..64, index: u32, detail: [u64; 3]) {
        let record = ErrorRecord { code, reserved: 0, index, detail };
        if let Some(refusal) = Refusal::from_record(&record) {
            let again = Refusal::from_record(&refusal.record(index));
            prop_assert_eq!(again, Some(refusal));
        }
    }

    #[test]
    fn records_fill_or_fail(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        match records::<OpRecord>(Tag::Ops, &bytes, 5) {
            Ok(it) => prop_assert_eq!(it.count() * size_of::<OpRecord>(), bytes.len()),
            Err(_) => prop_assert!(bytes.is_empty() || bytes.len() % 24 != 0 || bytes.len() > 120),
        }
    }
}

#[test]
fn tags_are_their_codes() {
    for code in 0..=255u8 {
        if let Some(tag) = Tag::from_code(code) {
            assert_eq!(tag as u8, code);
        }
    }
}
