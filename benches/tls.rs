//! TLS against bare TCP, side by side: rounds of both follow each other, and a
//! ratio is that of the medians of all rounds.

use farcell::{Client, Counter, Key, RdmaChoice, Result, Server, Slot, Tls, TransportChoice};
use std::time::Instant;

const ROUNDS: usize = 30;
const OPERATIONS: usize = 200;
const MESSAGE: usize = 4 << 20;

struct Side {
    _server: Server,
    client: Client,
    counter: Counter,
    slot: Slot,
    /// Microseconds: an operation, a handshake, a message there, and back.
    times: [Vec<f64>; 4],
}

fn connect(server: &Server, tls: Tls) -> Result<Client> {
    let key = Key::new(*b"the key of the bench")?;
    let builder = Client::builder().addr(server.address()).key(key).tls(tls);
    builder.transport(TransportChoice::Tcp).connect()
}

impl Side {
    fn new(tls: Tls) -> Result<Side> {
        let key = Key::new(*b"the key of the bench")?;
        let builder = Server::builder(key).bind("127.0.0.1:0").rdma(RdmaChoice::Off);
        let server = builder.tls(tls).workers(1).start()?;
        let client = connect(&server, tls)?;
        let counter = client.counters("c", 1, 1)?.at(0, 0)?;
        let slot = client.slots("s", 1, MESSAGE as u64)?.at(0)?;
        Ok(Side { _server: server, client, counter, slot, times: Default::default() })
    }

    fn round(&mut self, tls: Tls, buffer: &mut [u8]) -> Result<()> {
        assert_eq!(self.client.is_encrypted(), tls == Tls::Require);
        let micros = |begun: Instant| begun.elapsed().as_secs_f64() * 1e6;
        for _ in 0..OPERATIONS {
            let begun = Instant::now();
            self.counter.fetch_add(1)?;
            self.times[0].push(micros(begun));
        }
        let begun = Instant::now();
        let other = connect(&self._server, tls)?;
        self.times[1].push(micros(begun));
        other.close();
        let begun = Instant::now();
        self.slot.write(buffer)?;
        self.times[2].push(micros(begun));
        let begun = Instant::now();
        self.slot.read(buffer)?;
        self.times[3].push(micros(begun));
        Ok(())
    }
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() -> Result<()> {
    let mut buffer = vec![7; MESSAGE];
    let mut sides = [(Tls::Off, Side::new(Tls::Off)?), (Tls::Require, Side::new(Tls::Require)?)];
    for _ in 0..ROUNDS {
        for (tls, side) in &mut sides {
            side.round(*tls, &mut buffer)?;
        }
    }
    println!("median of                     plain        TLS    ratio");
    let names = ["an operation, us", "a connection, us", "4 MiB written, us", "4 MiB read, us"];
    for (i, name) in names.iter().enumerate() {
        let [plain, tls] = [0, 1].map(|side: usize| median(&mut sides[side].1.times[i]));
        println!("{name:<22} {plain:>12.1} {tls:>10.1} {:>8.2}", tls / plain);
    }
    Ok(())
}
