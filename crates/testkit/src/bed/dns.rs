//! A DNS server for pods. A bed has no kube-proxy, so `kubernetes.default` is the only reachable service, and a
//! complete DNS server is not needed.

use super::BedError;
use super::network::{DNS_ADDRESS, KUBERNETES_ADDRESS, Network};
use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Names that resolve, all to one address.
const KNOWN_NAMES: [&str; 2] = ["kubernetes.default.svc.cluster.local", "kubernetes.default.svc"];

/// A DNS server that runs until it is dropped.
#[derive(Debug)]
pub(super) struct DnsServer {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl DnsServer {
    pub(super) fn start(network: &Network) -> Result<Self, BedError> {
        let in_network = network.enter_temporarily()?;
        let socket =
            UdpSocket::bind((DNS_ADDRESS, 53)).map_err(BedError::io("opening the DNS server's port"))?;
        drop(in_network);
        socket
            .set_read_timeout(Some(Duration::from_millis(50)))
            .map_err(BedError::io("setting up the DNS server"))?;
        let stop = Arc::new(AtomicBool::new(false));
        let stop_requested = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut packet = [0; 512];
            while !stop_requested.load(Ordering::Relaxed) {
                let Ok((length, from)) = socket.recv_from(&mut packet) else { continue };
                if let Some(reply) = packet.get(..length).and_then(build_reply) {
                    // A client without a reply retries.
                    let _ = socket.send_to(&reply, from);
                }
            }
        });
        Ok(Self { stop, thread: Some(thread) })
    }
}

impl Drop for DnsServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        // An open socket would keep the network namespace alive.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

const HEADER_LEN: usize = 12;
/// Flags of a response: authoritative, recursion available.
const RESPONSE_FLAGS: [u8; 2] = [0x84, 0x80];
const NO_SUCH_NAME: u8 = 3;
const TYPE_A: u16 = 1;
const CLASS_IN: u16 = 1;

/// Returns the reply to a query with one question, and `None` for any other packet.
fn build_reply(query: &[u8]) -> Option<Vec<u8>> {
    let header = query.get(..HEADER_LEN)?;
    let is_query = header[2] & 0xf8 == 0;
    let questions = u16::from_be_bytes([header[4], header[5]]);
    if !is_query || questions != 1 {
        return None;
    }
    let (mut at, mut name) = (HEADER_LEN, String::new());
    loop {
        let length = usize::from(*query.get(at)?);
        at += 1;
        if length == 0 {
            break;
        }
        // Compression pointers are not valid in a question.
        if length > 63 {
            return None;
        }
        let label = std::str::from_utf8(query.get(at..at + length)?).ok()?;
        if !name.is_empty() {
            name.push('.');
        }
        name.push_str(&label.to_ascii_lowercase());
        at += length;
    }
    let question = query.get(at..at + 4)?;
    let kind = u16::from_be_bytes([question[0], question[1]]);
    let class = u16::from_be_bytes([question[2], question[3]]);
    let known = KNOWN_NAMES.contains(&name.as_str());
    let has_answer = known && kind == TYPE_A && class == CLASS_IN;
    let mut reply = Vec::with_capacity(at + 4 + 16);
    reply.extend_from_slice(&header[..2]);
    reply.extend_from_slice(&[
        RESPONSE_FLAGS[0] | (header[2] & 1),
        RESPONSE_FLAGS[1] | if known { 0 } else { NO_SUCH_NAME },
    ]);
    reply.extend_from_slice(&[0, 1, 0, u8::from(has_answer), 0, 0, 0, 0]);
    reply.extend_from_slice(query.get(HEADER_LEN..at + 4)?);
    if has_answer {
        // Name: a pointer to the question; TTL: five seconds; address: four bytes.
        reply.extend_from_slice(&[0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 5, 0, 4]);
        reply.extend_from_slice(&KUBERNETES_ADDRESS.octets());
    }
    Some(reply)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn query(name: &str, kind: u8) -> Vec<u8> {
        let mut packet = vec![7, 9, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0];
        for label in name.split('.') {
            packet.push(u8::try_from(label.len()).unwrap());
            packet.extend_from_slice(label.as_bytes());
        }
        packet.extend_from_slice(&[0, 0, kind, 0, 1]);
        packet
    }

    #[test]
    fn kubernetes_default_resolves_to_the_service_address() {
        let reply = build_reply(&query("Kubernetes.default.svc.cluster.local", 1)).unwrap();
        assert_eq!(&reply[..12], &[7, 9, 0x85, 0x80, 0, 1, 0, 1, 0, 0, 0, 0]);
        assert_eq!(&reply[reply.len() - 4..], &[10, 96, 0, 1]);
    }

    #[test]
    fn other_types_get_no_answer_and_other_names_nxdomain() {
        let reply = build_reply(&query("kubernetes.default.svc.cluster.local", 28)).unwrap();
        assert_eq!((reply[3] & 0xf, reply[7]), (0, 0));
        let reply = build_reply(&query("example.com", 1)).unwrap();
        assert_eq!((reply[3] & 0xf, reply[7]), (NO_SUCH_NAME, 0));
    }

    proptest! {
        #[test]
        fn arbitrary_packets_do_not_panic(packet in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = build_reply(&packet);
        }
    }
}
