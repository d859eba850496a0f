//! An issuer of tokens: its keys, signatures with them, and the server that publishes them.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

use ring::rand::SystemRandom;
use ring::signature::{ECDSA_P256_SHA256_FIXED_SIGNING, EcdsaKeyPair, KeyPair};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_util::task::AbortOnDropHandle;

/// The server's reaction to one request.
#[derive(Clone, Debug)]
pub(crate) enum IssuerAnswer {
    /// The published keys, or the OpenID configuration.
    Keys,
    /// This status and text.
    Text(u16, String),
    /// No answer.
    Hang,
}

struct IssuerState {
    answer: IssuerAnswer,
    keys: Vec<Value>,
    requests: Vec<String>,
}

/// A server with an issuer's OpenID configuration and keys.
pub(crate) struct TestIssuer {
    pub address: SocketAddr,
    state: Arc<Mutex<IssuerState>>,
    _server: AbortOnDropHandle<()>,
}

/// A key with which an issuer signs (ES256).
pub(crate) struct SigningKey {
    id: String,
    pair: EcdsaKeyPair,
}

impl TestIssuer {
    pub(crate) async fn start(keys: &[&SigningKey], answer: IssuerAnswer) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let keys = keys.iter().map(|key| key.jwk()).collect();
        let state = Arc::new(Mutex::new(IssuerState { answer, keys, requests: Vec::new() }));
        let server = tokio::spawn(serve(listener, Arc::clone(&state)));
        Self { address, state, _server: AbortOnDropHandle::new(server) }
    }

    /// The issuer's name: the address of its server.
    pub(crate) fn name(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(crate) fn publish(&self, keys: &[&SigningKey]) {
        self.state.lock().unwrap().keys = keys.iter().map(|key| key.jwk()).collect();
    }

    pub(crate) fn answers(&self, answer: IssuerAnswer) {
        self.state.lock().unwrap().answer = answer;
    }

    /// Requests for the keys.
    pub(crate) fn key_requests(&self) -> usize {
        self.state.lock().unwrap().requests.iter().filter(|path| *path == "/keys").count()
    }

    /// The claims of a good token.
    pub(crate) fn claims(&self) -> Value {
        json!({"iss": self.name(), "aud": "baton", "exp": now_s() + 600, "sub": "someone", "org": "chat"})
    }
}

async fn serve(listener: TcpListener, state: Arc<Mutex<IssuerState>>) {
    loop {
        let (mut stream, _) = listener.accept().await.unwrap();
        let state = Arc::clone(&state);
        tokio::spawn(async move {
            let mut head = Vec::new();
            while !head.ends_with(b"\r\n\r\n") {
                match stream.read_u8().await {
                    Ok(byte) => head.push(byte),
                    Err(_) => return,
                }
            }
            let head = String::from_utf8(head).unwrap();
            let path = head.split(' ').nth(1).unwrap().to_owned();
            let name = format!("http://{}", stream.local_addr().unwrap());
            let (answer, keys) = {
                let mut state = state.lock().unwrap();
                state.requests.push(path.clone());
                (state.answer.clone(), state.keys.clone())
            };
            let (status, text) = match (answer, path.as_str()) {
                (IssuerAnswer::Hang, _) => std::future::pending().await,
                (IssuerAnswer::Text(status, text), _) => (status, text),
                (IssuerAnswer::Keys, "/.well-known/openid-configuration") => {
                    (200, json!({"issuer": name, "jwks_uri": format!("{name}/keys")}).to_string())
                }
                (IssuerAnswer::Keys, "/keys") => (200, json!({"keys": keys}).to_string()),
                (IssuerAnswer::Keys, _) => (404, String::new()),
            };
            let length = text.len();
            let answer =
                format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{text}");
            // The router may have given up.
            let _ = stream.write_all(answer.as_bytes()).await;
        });
    }
}

impl SigningKey {
    pub(crate) fn new(id: &str) -> Self {
        let random = SystemRandom::new();
        let document = EcdsaKeyPair::generate_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, &random).unwrap();
        let pair = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_FIXED_SIGNING, document.as_ref(), &random);
        Self { id: id.to_owned(), pair: pair.unwrap() }
    }

    /// The public key, as an issuer publishes it.
    pub(crate) fn jwk(&self) -> Value {
        let point = self.pair.public_key().as_ref();
        json!({"kty": "EC", "crv": "P-256", "use": "sig", "alg": "ES256", "kid": self.id,
            "x": base64url(&point[1..33]), "y": base64url(&point[33..])})
    }

    /// A token with these claims.
    pub(crate) fn sign(&self, claims: &Value) -> String {
        self.sign_with(&json!({"typ": "JWT", "alg": "ES256", "kid": self.id}), claims)
    }

    /// A token with this header.
    pub(crate) fn sign_with(&self, header: &Value, claims: &Value) -> String {
        let [header, claims] = [header, claims].map(|part| base64url(part.to_string().as_bytes()));
        let message = format!("{header}.{claims}");
        let signature = self.pair.sign(&SystemRandom::new(), message.as_bytes()).unwrap();
        format!("{message}.{}", base64url(signature.as_ref()))
    }
}

pub(crate) fn now_s() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
}

/// Base64 with the alphabet for URLs and without padding (RFC 4648, section 5).
pub(crate) fn base64url(bytes: &[u8]) -> String {
    const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let mut text = String::new();
    for group in bytes.chunks(3) {
        let bits =
            group.iter().fold(0_u32, |bits, byte| bits << 8 | u32::from(*byte)) << (8 * (3 - group.len()));
        for n in 0..=group.len() {
            text.push(char::from(ALPHABET[(bits >> (18 - 6 * n) & 63) as usize]));
        }
    }
    text
}
