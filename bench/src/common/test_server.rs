//! An HTTP server of tests: fixed pages by path.

use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

/// Serves these pages until the runtime ends, and 404 for any other path. Returns the address.
pub(crate) async fn serve(pages: &[(&str, Value)]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("an address").to_string();
    let pages: Vec<_> = pages.iter().map(|(path, page)| ((*path).to_owned(), page.to_string())).collect();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(answer(stream, pages.clone()));
        }
    });
    address
}

async fn answer(mut stream: TcpStream, pages: Vec<(String, String)>) {
    let mut asked = Vec::new();
    while let Ok(1..) = stream.read_buf(&mut asked).await {
        if !asked.ends_with(b"\r\n\r\n") {
            continue;
        }
        let head = String::from_utf8(std::mem::take(&mut asked)).expect("a head");
        let path = head.split([' ', '?']).nth(1);
        let page = pages.iter().find(|(of, _)| path == Some(of.as_str()));
        let (status, body) = page.map_or((404, ""), |(_, page)| (200, page.as_str()));
        let response = format!("HTTP/1.1 {status} OK\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        if stream.write_all(response.as_bytes()).await.is_err() {
            return;
        }
    }
}
