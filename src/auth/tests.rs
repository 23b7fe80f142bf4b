use super::*;
use proptest::prelude::*;

fn keys() -> Keys {
    Keys {
        full: Key::new(*b"full key").unwrap(),
        read_only: Some(Key::new(*b"read-only key").unwrap()),
    }
}

const WELCOME: Welcome = Welcome {
    access: Access::ReadWrite,
    domain: Domain::Cpu,
    resumed: true,
    offers_rdma: true,
    offers_shm: true,
    incarnation: 5,
    session: 6,
    capacity: 7,
    lease_ms: 8,
    seat: 9,
};

/// Runs an exchange in which `tamper` may change any message under way.
fn exchange(
    client_key: &Key,
    mut tamper: impl FnMut(usize, &mut [u8]),
) -> (Option<Access>, Result<Welcome, HandshakeError>) {
    let server = ServerHandshake::new([1; 32]);
    let mut greeting = server.greeting();
    tamper(0, &mut greeting);
    let resume = Resume { incarnation: 5, session: 6, next_request: 9, beside: true };
    let client = match ClientHandshake::new(&greeting, [2; 32], resume, client_key, Job::default())
    {
        Ok(client) => client,
        Err(e) => return (None, Err(e)),
    };
    let mut hello = client.hello();
    tamper(1, &mut hello);
    match server.hello(&hello, &keys(), Job::default()) {
        Ok(proven) => {
            let welcome = Welcome { access: proven.access, ..WELCOME };
            let mut bytes = server.welcome(&proven, &welcome, &keys());
            tamper(2, &mut bytes);
            (Some(proven.access), client.welcome(&bytes))
        }
        Err(Some(reason)) => (None, client.welcome(&denial(reason))),
        Err(None) => (None, Err(HandshakeError::NotFarcell)),
    }
}

#[test]
fn each_key_opens_its_door() {
    let (access, welcome) = exchange(&keys().full, |_, _| ());
    assert_eq!((access, welcome), (Some(Access::ReadWrite), Ok(WELCOME)));
    let (access, welcome) = exchange(&keys().read_only.unwrap(), |_, _| ());
    assert_eq!(access, Some(Access::ReadOnly));
    assert_eq!(welcome.unwrap().access, Access::ReadOnly);
    let (access, welcome) = exchange(&Key::new(*b"another").unwrap(), |_, _| ());
    assert_eq!((access, welcome), (None, Err(Denial::Key.into())));
}

#[test]
fn a_secret_does_not_show() {
    assert_eq!(format!("{:?}", keys().full), "Key(secret)");
    assert_eq!(Key::new(Vec::new()), Err(KeyError::Empty));
    assert_eq!(Key::new(vec![1; MAX_KEY + 1]), Err(KeyError::TooLong));
}

#[test]
fn a_server_without_the_key_is_found_out() {
    let client_key = keys().full;
    let thief = Keys { full: Key::new(*b"guess").unwrap(), read_only: None };
    let server = ServerHandshake::new([3; 32]);
    let client = ClientHandshake::new(
        &server.greeting(),
        [4; 32],
        Resume::default(),
        &client_key,
        Job::default(),
    )
    .unwrap();
    let proven = server.hello(&client.hello(), &keys(), Job::default()).unwrap();
    let forged = server.welcome(&proven, &WELCOME, &thief);
    assert_eq!(client.welcome(&forged), Err(HandshakeError::Impostor));
    // Nor is the client's own proof, sent back, one of the server.
    let mut echoed = server.welcome(&proven, &WELCOME, &thief);
    echoed[WELCOME_LEN - PROOF..].copy_from_slice(&client.hello()[HELLO_LEN - PROOF..]);
    assert_eq!(client.welcome(&echoed), Err(HandshakeError::Impostor));
}

#[test]
fn another_version_is_named_on_both_sides() {
    let (_, seen) = exchange(&keys().full, |n, bytes| {
        if n == 0 {
            bytes[8] = 9;
        }
    });
    assert_eq!(seen, Err(HandshakeError::Version(9)));
    let server = ServerHandshake::new([1; 32]);
    let key = keys().full;
    let client =
        ClientHandshake::new(&server.greeting(), [2; 32], Resume::default(), &key, Job::default())
            .unwrap();
    let mut hello = client.hello();
    hello[8] = 9;
    assert_eq!(server.hello(&hello, &keys(), Job::default()).unwrap_err(), Some(Denial::Version));
}

proptest! {
    #[test]
    fn any_changed_bit_ends_it(message in 0usize..3, at in 0usize..200, bit in 0u8..8) {
        let mut changed = false;
        let (access, welcome) = exchange(&keys().full, |n, bytes| {
            if n == message && at < bytes.len() {
                bytes[at] ^= 1 << bit;
                changed = true;
            }
        });
        if changed {
            prop_assert!(welcome.is_err());
            prop_assert_eq!(access.is_some(), message == 2);
        }
    }

    #[test]
    fn a_recorded_hello_opens_nothing(nonce: [u8; 32]) {
        prop_assume!(nonce != [1; 32]);
        let first = ServerHandshake::new([1; 32]);
        let key = keys().full;
        let client = ClientHandshake::new(&first.greeting(), [2; 32], Resume::default(), &key, Job::default()).unwrap();
        let second = ServerHandshake::new(nonce);
        prop_assert_eq!(second.hello(&client.hello(), &keys(), Job::default()).unwrap_err(), Some(Denial::Key));
    }

    #[test]
    fn arbitrary_bytes_open_nothing(bytes: [u8; HELLO_LEN], magic: bool) {
        let mut bytes = bytes;
        if magic { bytes[..8].copy_from_slice(&MAGIC); }
        prop_assert!(ServerHandshake::new([1; 32]).hello(&bytes, &keys(), Job::default()).is_err());
    }

    #[test]
    fn arbitrary_answers_are_believed_by_nobody(greeting: [u8; GREETING_LEN], welcome: [u8; WELCOME_LEN], magic: bool) {
        let key = keys().full;
        let _ = ClientHandshake::new(&greeting, [2; 32], Resume::default(), &key, Job::default());
        let server = ServerHandshake::new([1; 32]);
        let client = ClientHandshake::new(&server.greeting(), [2; 32], Resume::default(), &key, Job::default()).unwrap();
        let mut welcome = welcome;
        if magic { welcome[..8].copy_from_slice(&MAGIC); welcome[10] = 0; }
        prop_assert!(client.welcome(&welcome).is_err());
    }
}

#[test]
fn another_jobs_client_is_refused_and_one_of_none_let_in() {
    let server = ServerHandshake::new([1; 32]);
    let key = Key::new(*b"full key").unwrap();
    for (ours, theirs, fits) in [
        ("run-1", "run-1", true),
        ("run-1", "run-2", false),
        ("run-1", "", true),
        ("", "run-2", true),
    ] {
        let resume = Resume::default();
        let job = Job::new(theirs);
        let client = ClientHandshake::new(&server.greeting(), [2; 32], resume, &key, job).unwrap();
        let judged = server.hello(&client.hello(), &keys(), Job::new(ours));
        match fits {
            true => assert!(judged.is_ok(), "{ours:?} {theirs:?}"),
            false => assert_eq!(judged.unwrap_err(), Some(Denial::Job)),
        }
    }
}
