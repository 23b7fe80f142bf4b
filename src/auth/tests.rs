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

/// What a client says that does not encrypt.
fn hello_of(client: &ClientHandshake<'_>) -> [u8; HELLO_LEN] {
    client.hello().try_into().unwrap()
}

/// Runs an exchange in which `tamper` may change any message under way.
fn exchange(
    client_key: &Key,
    tamper: impl FnMut(usize, &mut [u8]),
) -> (Option<Access>, Result<Welcome, HandshakeError>) {
    exchange_in([None; 2], client_key, tamper)
}

/// The same inside of TLS, with what the client and the server take for what only
/// they know.
fn exchange_in(
    [ours, theirs]: [Option<Binding>; 2],
    client_key: &Key,
    mut tamper: impl FnMut(usize, &mut [u8]),
) -> (Option<Access>, Result<Welcome, HandshakeError>) {
    let server = ServerHandshake::new([1; 32], Tls::Auto);
    let mut greeting = server.greeting();
    tamper(0, &mut greeting);
    let resume = Resume { incarnation: 5, session: 6, next_request: 9, beside: true };
    let (nonce, job) = ([2; 32], Job::default());
    let client = match ClientHandshake::new(&greeting, nonce, resume, client_key, job, ours) {
        Ok(client) => client,
        Err(e) => return (None, Err(e)),
    };
    let mut hello = client.hello();
    tamper(1, &mut hello);
    let (hello, said) = hello.split_first_chunk().unwrap();
    let said = said.first_chunk().map(|bytes| Binding::new(*bytes));
    match server.hello(hello, said.as_ref().zip(theirs.as_ref()), &keys(), job) {
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
    assert_eq!(Key::new(Vec::new()).err(), Some(KeyError::Empty));
    assert_eq!(Key::new(vec![1; MAX_KEY + 1]).err(), Some(KeyError::TooLong));
}

#[test]
fn a_server_without_the_key_is_found_out() {
    let client_key = keys().full;
    let thief = Keys { full: Key::new(*b"guess").unwrap(), read_only: None };
    let server = ServerHandshake::new([3; 32], Tls::Off);
    let client = ClientHandshake::new(
        &server.greeting(),
        [4; 32],
        Resume::default(),
        &client_key,
        Job::default(),
        None,
    )
    .unwrap();
    let proven = server.hello(&hello_of(&client), None, &keys(), Job::default()).unwrap();
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
    let server = ServerHandshake::new([1; 32], Tls::Off);
    let key = keys().full;
    let client = ClientHandshake::new(
        &server.greeting(),
        [2; 32],
        Resume::default(),
        &key,
        Job::default(),
        None,
    )
    .unwrap();
    let mut hello = hello_of(&client);
    hello[8] = 9;
    assert_eq!(
        server.hello(&hello, None, &keys(), Job::default()).unwrap_err(),
        Some(Denial::Version)
    );
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
        let first = ServerHandshake::new([1; 32], Tls::Off);
        let key = keys().full;
        let client = ClientHandshake::new(&first.greeting(), [2; 32], Resume::default(), &key, Job::default(), None).unwrap();
        let second = ServerHandshake::new(nonce, Tls::Off);
        prop_assert_eq!(second.hello(&hello_of(&client), None, &keys(), Job::default()).unwrap_err(), Some(Denial::Key));
    }

    #[test]
    fn arbitrary_bytes_open_nothing(bytes: [u8; HELLO_LEN], magic: bool) {
        let mut bytes = bytes;
        if magic { bytes[..8].copy_from_slice(&MAGIC); }
        prop_assert!(ServerHandshake::new([1; 32], Tls::Off).hello(&bytes, None, &keys(), Job::default()).is_err());
    }

    #[test]
    fn arbitrary_answers_are_believed_by_nobody(greeting: [u8; GREETING_LEN], welcome: [u8; WELCOME_LEN], magic: bool) {
        let key = keys().full;
        let _ = ClientHandshake::new(&greeting, [2; 32], Resume::default(), &key, Job::default(), None);
        let server = ServerHandshake::new([1; 32], Tls::Off);
        let client = ClientHandshake::new(&server.greeting(), [2; 32], Resume::default(), &key, Job::default(), None).unwrap();
        let mut welcome = welcome;
        if magic { welcome[..8].copy_from_slice(&MAGIC); welcome[10] = 0; }
        prop_assert!(client.welcome(&welcome).is_err());
    }
}

#[test]
fn another_jobs_client_is_refused_and_one_of_none_let_in() {
    let server = ServerHandshake::new([1; 32], Tls::Off);
    let key = Key::new(*b"full key").unwrap();
    for (ours, theirs, fits) in [
        ("run-1", "run-1", true),
        ("run-1", "run-2", false),
        ("run-1", "", true),
        ("", "run-2", true),
    ] {
        let resume = Resume::default();
        let job = Job::new(theirs);
        let client =
            ClientHandshake::new(&server.greeting(), [2; 32], resume, &key, job, None).unwrap();
        let judged = server.hello(&hello_of(&client), None, &keys(), Job::new(ours));
        match fits {
            true => assert!(judged.is_ok(), "{ours:?} {theirs:?}"),
            false => assert_eq!(judged.unwrap_err(), Some(Denial::Job)),
        }
    }
}

const HERE: Option<Binding> = Some(Binding::new([7; 32]));
const THERE: Option<Binding> = Some(Binding::new([8; 32]));

#[test]
fn inside_of_tls_the_proof_is_good_at_its_two_ends_alone() {
    let key = keys().full;
    let (access, welcome) = exchange_in([HERE, HERE], &key, |_, _| ());
    assert_eq!((access, welcome), (Some(Access::ReadWrite), Ok(WELCOME)));
    // Someone in the middle has two connections, and passes on what is said.
    let (access, welcome) = exchange_in([HERE, THERE], &key, |_, _| ());
    assert_eq!((access, welcome), (None, Err(Denial::Intercepted.into())));
    // He puts in what the server expects, and has no key to prove it by.
    let (access, welcome) = exchange_in([HERE, THERE], &key, |n, bytes| {
        if n == 1 {
            bytes[HELLO_LEN..].fill(8);
        }
    });
    assert_eq!((access, welcome), (None, Err(Denial::Key.into())));
    // A wrong key is told as one.
    let (_, welcome) = exchange_in([HERE, HERE], &Key::new(*b"another").unwrap(), |_, _| ());
    assert_eq!(welcome, Err(Denial::Key.into()));
}

#[test]
fn a_welcome_from_another_tls_connection_is_an_impostors() {
    let key = keys().full;
    let server = ServerHandshake::new([1; 32], Tls::Require);
    let (resume, job) = (Resume::default(), Job::default());
    let greeting = server.greeting();
    let client = ClientHandshake::new(&greeting, [2; 32], resume, &key, job, HERE).unwrap();
    // A server that did not look, so that the client has to.
    let hello: Hello = *bytemuck::from_bytes(&client.hello()[..HELLO_LEN]);
    let proven = |binding| Proven { hello, binding, access: Access::ReadWrite, resume };
    let forwarded = server.welcome(&proven(THERE), &WELCOME, &keys());
    assert_eq!(client.welcome(&forwarded), Err(HandshakeError::Impostor));
    let in_clear = server.welcome(&proven(None), &WELCOME, &keys());
    assert_eq!(client.welcome(&in_clear), Err(HandshakeError::Impostor));
    let right = server.welcome(&proven(HERE), &WELCOME, &keys());
    assert_eq!(client.welcome(&right), Ok(WELCOME));
}

#[test]
fn what_was_offered_cannot_be_taken_away() {
    let key = keys().full;
    for changed in [0, 2, 200] {
        let (access, welcome) = exchange(&key, |n, bytes| {
            if n == 0 {
                bytes[10] = changed;
            }
        });
        assert_eq!((access, welcome), (None, Err(Denial::Key.into())));
    }
    let greeting = |tls| ServerHandshake::new([1; 32], tls).greeting();
    assert_eq!(offered(&greeting(Tls::Off), Tls::Require), Err(HandshakeError::NoTls));
    assert_eq!(offered(&greeting(Tls::Off), Tls::Auto), Ok(Tls::Off));
    assert_eq!(offered(&greeting(Tls::Require), Tls::Off), Ok(Tls::Require));
    // A proof in clear is none inside of TLS, nor the other way round.
    let server = ServerHandshake::new([1; 32], Tls::Auto);
    let (resume, job) = (Resume::default(), Job::default());
    let bytes = server.greeting();
    let clear = ClientHandshake::new(&bytes, [2; 32], resume, &key, job, None).unwrap();
    let ends = HERE.as_ref().zip(HERE.as_ref());
    let judged = server.hello(&hello_of(&clear), ends, &keys(), job);
    assert_eq!(judged.unwrap_err(), Some(Denial::Key));
    let sealed = ClientHandshake::new(&bytes, [2; 32], resume, &key, job, HERE).unwrap();
    let hello = sealed.hello().first_chunk().copied().unwrap();
    assert_eq!(server.hello(&hello, None, &keys(), job).unwrap_err(), Some(Denial::Key));
}

#[test]
fn who_requires_tls_takes_nothing_else() {
    let key = keys().full;
    let server = ServerHandshake::new([1; 32], Tls::Require);
    let (resume, job) = (Resume::default(), Job::default());
    let client =
        ClientHandshake::new(&server.greeting(), [2; 32], resume, &key, job, None).unwrap();
    let judged = server.hello(&hello_of(&client), None, &keys(), job);
    assert_eq!(judged.unwrap_err(), Some(Denial::TlsRequired));
}
