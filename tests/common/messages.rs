//! Messages whose bytes all depend on one number, so that a mix of two shows.

use farcell::{Received, Slot};

/// Sizes around everything that could matter: words, lines, pages, pieces.
pub const SIZES: [usize; 16] = [
    8, 9, 15, 16, 63, 64, 65, 1000, 4095, 4096, 4097, 65_536, 262_143, 262_145, 1_048_579,
    4_194_304,
];

/// The largest of them.
pub const LARGEST: u64 = 4_194_304;

fn word(number: u64, i: usize) -> [u8; 8] {
    (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ i as u64).to_le_bytes()
}

/// How long the message with this number is.
pub fn size(number: u64) -> usize {
    SIZES[number as usize % SIZES.len()]
}

/// The message with this number, which its first eight bytes are.
pub fn message(number: u64) -> Vec<u8> {
    of_size(number, size(number))
}

/// The same with another length.
pub fn of_size(number: u64, size: usize) -> Vec<u8> {
    let mut bytes = vec![0; size];
    for (i, chunk) in bytes.chunks_mut(8).enumerate() {
        let word = if i == 0 { number.to_le_bytes() } else { word(number, i) };
        chunk.copy_from_slice(&word[..chunk.len()]);
    }
    bytes
}

/// The number of the message that these bytes are; panics if they are none.
pub fn check(bytes: &[u8]) -> u64 {
    let number = u64::from_le_bytes(bytes[..8].try_into().unwrap());
    for (i, chunk) in bytes.chunks(8).enumerate().skip(1) {
        assert_eq!(chunk, &word(number, i)[..chunk.len()], "message {number} is torn at {}", i * 8);
    }
    number
}

/// Reads the message and returns its number; 0 if there is none.
pub fn read(slot: &Slot, buffer: &mut [u8]) -> farcell::Result<(u64, Received)> {
    let received = slot.read(buffer)?;
    if received.version == 0 {
        return Ok((0, received));
    }
    let number = check(&buffer[..received.len]);
    assert_eq!(received.len as u64, received.total);
    Ok((number, received))
}
