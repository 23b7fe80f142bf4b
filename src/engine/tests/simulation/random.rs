//! Random numbers that are the same for the same seed on every machine.

/// SplitMix64 (Steele, Lea and Flood, 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Those of one step of a run: what the other steps are makes no difference.
    pub fn of(seed: u64, step: u32) -> Random {
        let mut random = Random(seed ^ u64::from(step).wrapping_mul(0xd134_2543_de82_ef95));
        random.number();
        random
    }

    pub fn number(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// Below `most`, which is not 0.
    pub fn below(&mut self, most: u64) -> u64 {
        self.number() % most
    }

    /// So often in a hundred.
    pub fn often(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}
