//! The handshake, both sides: with messages of anyone, and with real ones of
//! which something was changed on the way.

use super::Input;
use crate::auth::{
    Access, ClientHandshake, Domain, GREETING_LEN, HELLO_LEN, Job, Key, Keys, Resume,
    ServerHandshake, Tls, WELCOME_LEN, Welcome,
};

/// Changes some of the bytes, as the input says.
fn spoil(bytes: &mut [u8], input: &mut Input<'_>) {
    for _ in 0..input.byte() % 4 {
        let [at, by] = input.array();
        if let Some(byte) = bytes.get_mut(usize::from(at)) {
            *byte ^= by;
        }
    }
}

/// Nothing that was not made with the key, for this very connection, lets
/// anyone in or is taken for the server's word.
pub fn handshake(data: &[u8]) {
    let mut input = Input(data);
    let (Ok(full), Ok(read_only)) = (Key::new(*b"full"), Key::new(*b"read")) else {
        return;
    };
    let keys = Keys { full, read_only: Some(read_only) };
    let [which, beside, jobs] = input.array();
    let server = ServerHandshake::new(input.array(), Tls::Off);
    let (server_job, client_job) = match jobs % 3 {
        0 => (Job::default(), Job::default()),
        1 => (Job::new("one"), Job::new("one")),
        _ => (Job::new("one"), Job::new("another")),
    };

    // The greeting of a stranger, then what has become of ours.
    let stranger: [u8; GREETING_LEN] = input.array();
    let resume = Resume {
        incarnation: u64::from_le_bytes(input.array()),
        session: u64::from_le_bytes(input.array()),
        next_request: u64::from_le_bytes(input.array()),
        beside: beside & 1 != 0,
    };
    let key =
        if which & 1 == 0 { &keys.full } else { keys.read_only.as_ref().unwrap_or(&keys.full) };
    let _ = ClientHandshake::new(&stranger, [0; 32], resume, key, client_job, None);
    let mut greeting = server.greeting();
    spoil(&mut greeting, &mut input);
    let nonce = input.array();
    let Ok(client) = ClientHandshake::new(&greeting, nonce, resume, key, client_job, None) else {
        assert_ne!(greeting, server.greeting(), "a good greeting was refused");
        return;
    };

    let hello: [u8; HELLO_LEN] = input.array();
    assert!(server.hello(&hello, None, &keys, server_job).is_err(), "a stranger was let in");
    let sent = client.hello();
    let Some(&sent) = sent.first_chunk::<HELLO_LEN>() else {
        return;
    };
    let mut hello = sent;
    spoil(&mut hello, &mut input);
    let whole = hello == sent && greeting == server.greeting();
    let proven = match server.hello(&hello, None, &keys, server_job) {
        Ok(proven) => proven,
        Err(_) => {
            assert!(!whole || jobs % 3 == 2, "a good client was refused");
            return;
        }
    };
    assert!(whole && jobs % 3 != 2, "a client was let in that should not be");
    assert_eq!(proven.access == Access::ReadOnly, which & 1 != 0);
    assert_eq!(proven.resume, resume);

    let welcome: [u8; WELCOME_LEN] = input.array();
    assert!(client.welcome(&welcome).is_err(), "an impostor was believed");
    let said = Welcome {
        access: proven.access,
        domain: if which & 2 == 0 { Domain::Cpu } else { Domain::Hca },
        resumed: which & 4 != 0,
        offers_rdma: which & 8 != 0,
        offers_shm: which & 16 != 0,
        incarnation: u64::from_le_bytes(input.array()),
        session: u64::from_le_bytes(input.array()),
        capacity: u64::from_le_bytes(input.array()),
        lease_ms: u32::from_le_bytes(input.array()).into(),
        seat: u32::from_le_bytes(input.array()),
    };
    let sent = server.welcome(&proven, &said, &keys);
    let mut welcome = sent;
    spoil(&mut welcome, &mut input);
    match client.welcome(&welcome) {
        Ok(heard) => {
            assert_eq!(welcome, sent, "a changed answer was believed");
            assert_eq!(heard, said);
        }
        Err(_) => assert_ne!(welcome, sent, "a good answer was refused"),
    }
}
