//! Who sends to whom. Pure.

use crate::error::{Error, Result};

/// Who sends messages to whom. Every learner has the same number of groups, each
/// one peer to send to; in a round some groups are in use, all of them the same
/// ones. Within a group each learner also has exactly one peer to receive from,
/// so that mixing with equal weights keeps the mean of all learners (it is doubly
/// stochastic).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Topology {
    /// Each sends to the next one. One group.
    Ring,
    /// Each sends to those 1, 2, 4, 8 and so on ahead: a message is everywhere
    /// after few rounds.
    Exponential,
    /// Even learners exchange messages with odd ones, 1, 3, 5, 9 and so on away:
    /// two who talk always do so both ways. For even numbers of learners.
    Bipartite,
    /// Each sends to every other one.
    Full,
}

impl std::str::FromStr for Topology {
    type Err = String;
    fn from_str(s: &str) -> Result<Topology, String> {
        match s {
            "ring" => Ok(Topology::Ring),
            "exponential" => Ok(Topology::Exponential),
            "bipartite" => Ok(Topology::Bipartite),
            "full" => Ok(Topology::Full),
            other => {
                Err(format!("{other:?} is no topology; use ring, exponential, bipartite or full"))
            }
        }
    }
}

impl Topology {
    /// How far ahead the peer of each group is.
    fn steps(self, learners: usize) -> Vec<usize> {
        let powers = || (0..usize::BITS).map(|i| 1usize << i).take_while(|&p| p < learners);
        match self {
            Topology::Ring => vec![1],
            Topology::Exponential => powers().collect(),
            Topology::Bipartite => {
                let odd = powers().map(|p| if p == 1 { 1 } else { p + 1 });
                odd.filter(|&step| step < learners).collect()
            }
            Topology::Full => (1..learners).collect(),
        }
    }

    /// The peers to send to, one a group, of each learner in turn.
    ///
    /// # Errors
    /// [`Error::BadSetting`] for fewer than two learners, or an odd number of
    /// them that is to be bipartite.
    pub fn peers(self, learners: usize) -> Result<Vec<Vec<usize>>> {
        if learners < 2 {
            return Err(Error::BadSetting { what: "gossip needs two learners at least".into() });
        }
        if self == Topology::Bipartite && learners % 2 == 1 {
            let what =
                format!("{learners} learners cannot be bipartite: their number must be even");
            return Err(Error::BadSetting { what });
        }
        let steps = self.steps(learners);
        let peer = |rank: usize, step: usize| match self {
            Topology::Bipartite if rank % 2 == 1 => (rank + learners - step) % learners,
            _ => (rank + step) % learners,
        };
        Ok((0..learners).map(|rank| steps.iter().map(|&step| peer(rank, step)).collect()).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_group_is_a_permutation_without_oneself() {
        let all = [Topology::Ring, Topology::Exponential, Topology::Bipartite, Topology::Full];
        for topology in all {
            for learners in 2..40 {
                let Ok(book) = topology.peers(learners) else {
                    assert!(topology == Topology::Bipartite && learners % 2 == 1);
                    continue;
                };
                for group in 0..book[0].len() {
                    let mut seen = vec![false; learners];
                    for (rank, peers) in book.iter().enumerate() {
                        let peer = peers[group];
                        assert!(peer != rank && !std::mem::replace(&mut seen[peer], true));
                        if topology == Topology::Bipartite {
                            assert_ne!(rank % 2, peer % 2);
                            assert_eq!(book[peer][group], rank, "they exchange");
                        }
                    }
                }
            }
        }
        assert!(Topology::Ring.peers(1).is_err());
        assert_eq!(Topology::Exponential.peers(8).unwrap()[7], [0, 1, 3]);
    }
}
