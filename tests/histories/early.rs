//! Between a client and its server, one that answers a store before the server has
//! done it: what a server would be that replied before it changed the cell.

use std::collections::HashSet;
use std::io::{Read, Result, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

// Of docs/protocol.md.
const GREETING: usize = 48;
const HELLO: usize = 112;
const WELCOME: usize = 80;
const HEADER: usize = 16;
const OPS: u8 = 1;
const WORDS: u8 = 64;
const OP_RECORD: usize = 24;
const STORE: u8 = 5;

/// Listens for clients of that server, and passes on what they say, until the test is
/// over. Each store that comes alone is answered, if at all, this much `early`.
pub fn start(server: SocketAddr, early: Option<Duration>) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for client in listener.incoming() {
            let (client, server) = (client.unwrap(), TcpStream::connect(server).unwrap());
            client.set_nodelay(true).unwrap();
            server.set_nodelay(true).unwrap();
            let answered = Arc::new(Mutex::new(HashSet::new()));
            // Two write to the client: a frame at a time.
            let to_client = Arc::new(Mutex::new(client.try_clone().unwrap()));
            let (from_server, also) = (server.try_clone().unwrap(), answered.clone());
            let down = to_client.clone();
            thread::spawn(move || drop(replies(from_server, &down, &also)));
            thread::spawn(move || drop(requests(client, server, &to_client, &answered, early)));
        }
    });
    addr
}

/// The next frame, its header and all.
fn frame(from: &mut TcpStream) -> Result<Vec<u8>> {
    let mut bytes = vec![0; HEADER];
    from.read_exact(&mut bytes)?;
    let len = u32::from_le_bytes(bytes[..4].try_into().unwrap()) as usize;
    bytes.resize(HEADER + len, 0);
    from.read_exact(&mut bytes[HEADER..])?;
    Ok(bytes)
}

fn requests(
    mut client: TcpStream,
    mut server: TcpStream,
    to_client: &Mutex<TcpStream>,
    answered: &Mutex<HashSet<[u8; 8]>>,
    early: Option<Duration>,
) -> Result<()> {
    let mut hello = [0; HELLO];
    client.read_exact(&mut hello)?;
    server.write_all(&hello)?;
    loop {
        let bytes = frame(&mut client)?;
        let is_store = bytes[4] == OPS && bytes.len() == HEADER + OP_RECORD;
        if let Some(early) = early.filter(|_| is_store && bytes[HEADER] == STORE) {
            let id: [u8; 8] = bytes[8..16].try_into().unwrap();
            answered.lock().unwrap().insert(id);
            // One word, which a store looks at no more.
            let mut reply = vec![8, 0, 0, 0, WORDS, 0, 0, 0];
            reply.extend(id);
            reply.extend([0; 8]);
            to_client.lock().unwrap().write_all(&reply)?;
            thread::sleep(early);
        }
        server.write_all(&bytes)?;
    }
}

fn replies(
    mut server: TcpStream,
    to_client: &Mutex<TcpStream>,
    answered: &Mutex<HashSet<[u8; 8]>>,
) -> Result<()> {
    let mut begin = [0; GREETING];
    server.read_exact(&mut begin)?;
    to_client.lock().unwrap().write_all(&begin)?;
    let mut begin = [0; WELCOME];
    server.read_exact(&mut begin)?;
    to_client.lock().unwrap().write_all(&begin)?;
    loop {
        let bytes = frame(&mut server)?;
        if !answered.lock().unwrap().remove(&bytes[8..16]) {
            to_client.lock().unwrap().write_all(&bytes)?;
        }
    }
}
