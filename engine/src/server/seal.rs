//! `remote_seal`: a producer's proof, with the cluster's secret, that it issued a handoff's handle and address.
//!
//! A request without the secret is refused (401), and its lease should be released like any other, because the handle
//! is the right to release. But a notice is a connection to the address in the handoff, and an unauthorized caller
//! must not choose that address. A handoff of such a caller is therefore released only with the seal of a producer of
//! this cluster.

use baton_connector::Handoff;
use baton_connector_tcp::Secret;
use serde_json::Value;

use crate::blocks::hash::hex_bytes;

/// The field of `kv_transfer_params`, 64 hexadecimal digits; absent without a secret.
const FIELD: &str = "remote_seal";

/// Separates these codes from those of the handshake.
const PURPOSE: &[u8] = b"baton handoff v2";

/// A producer's reply: the handoff, sealed if there is a secret.
pub(super) fn reply(secret: Option<&Secret>, handoff: &Handoff) -> Value {
    let mut reply = handoff.to_reply();
    if let (Some(secret), Some(fields)) = (secret, reply.as_object_mut()) {
        let seal = with_parts(handoff, |words| secret.authenticate(words));
        let hex: String = seal.iter().map(|byte| format!("{byte:02x}")).collect();
        fields.insert(FIELD.to_owned(), Value::from(hex));
    }
    reply
}

/// Whether a producer with the secret issued this handoff's handle and address.
pub(super) fn is_genuine(secret: &Secret, handoff: &Handoff, params: &Value) -> bool {
    let seal = params.get(FIELD).and_then(Value::as_str).and_then(hex_bytes::<32>);
    seal.is_some_and(|seal| with_parts(handoff, |words| secret.is_authentic(words, &seal)))
}

/// The parts of a handoff that a notice uses. The number of ports precedes them, and only the last part has a
/// variable length.
fn with_parts<T>(handoff: &Handoff, act: impl FnOnce(&[&[u8]]) -> T) -> T {
    let (handle, epoch) = (handoff.handle.0.to_le_bytes(), handoff.epoch.0.to_le_bytes());
    let counts = [handoff.ports.len() as u64, handoff.block_tokens as u64, u64::from(handoff.consumers)];
    let counts = counts.map(u64::to_le_bytes).concat();
    let ports: Vec<u8> = handoff.ports.iter().flat_map(|port| port.to_le_bytes()).collect();
    act(&[PURPOSE, &handle, &epoch, &counts, &ports, handoff.host.as_bytes()])
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use baton_connector::handoff::KvIntent;
    use baton_connector::{BlockId, Epoch, Handle, RequestId};

    use super::*;

    #[test]
    fn a_seal_is_valid_for_one_handle_address_and_secret() {
        let secret = |text: &str| Secret::new(text.as_bytes()).expect("long enough");
        let ours = secret("the cluster's own secret");
        let handoff = Handoff {
            handle: Handle(1),
            epoch: Epoch(2),
            engine_id: "p".into(),
            request: RequestId::new("r").expect("an id"),
            host: "10.0.0.1".into(),
            ports: vec![5600, 5601],
            blocks: vec![BlockId(0)],
            block_tokens: 16,
            tokens: 2,
            lease_left: Some(Duration::from_secs(1)),
            layout: 3,
            prompt: 4,
            cached: 0,
            consumers: 2,
            growing: false,
        };
        let sealed = reply(Some(&ours), &handoff);
        let Ok(Some(KvIntent::Consume(read))) = KvIntent::parse(&sealed) else { panic!("{sealed}") };
        assert!(is_genuine(&ours, &read, &sealed));
        assert!(!is_genuine(&secret("another cluster's secret"), &read, &sealed));
        let rotated = secret("the cluster's next secret").with_previous(b"the cluster's own secret");
        assert!(is_genuine(&rotated.expect("long enough"), &read, &sealed), "a rotation");
        assert!(!is_genuine(&ours, &read, &reply(None, &handoff)), "no seal");
        let elsewhere = [
            Handoff { host: "10.0.0.2".into(), ..handoff.clone() },
            Handoff { ports: vec![5600, 5602], ..handoff.clone() },
            Handoff { ports: vec![5600], ..handoff.clone() },
            Handoff { consumers: 1, ..handoff.clone() },
            Handoff { handle: Handle(9), ..handoff.clone() },
            Handoff { epoch: Epoch(9), ..handoff.clone() },
        ];
        for other in elsewhere {
            assert!(!is_genuine(&ours, &other, &sealed), "{other:?}");
        }
        for seal in ["", "0", &"0".repeat(64), &"é".repeat(32), &"g".repeat(64)] {
            let mut forged = sealed.clone();
            forged[FIELD] = Value::from(seal);
            assert!(!is_genuine(&ours, &read, &forged), "{seal}");
        }
    }
}
