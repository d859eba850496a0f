//! The HTTP servers of a simulated SGLang engine: its API, and P's bootstrap server.

use std::io;
use std::sync::Arc;

use serde_json::{Value, json};
use tokio::net::TcpStream;

use super::super::http::{HttpRequest, json as json_reply, refusal, reply};
use super::super::server::{accept, events_page};
use super::body::GeneratePath;
use super::engine::SglangEngine;
use super::rank::EndCause;
use super::{bootstrap, generate, links, pages};
use crate::sim::instant::connection::ServerConnection;

/// The sockets of an engine.
pub(super) struct SglangListeners {
    pub api: std::net::TcpListener,
    pub peers: std::net::TcpListener,
    pub bootstrap: Option<std::net::TcpListener>,
}

/// Serves until the engine is stopped, then closes every connection.
pub(super) async fn serve(listeners: SglangListeners, engine: Arc<SglangEngine>) {
    let api = accept(listeners.api, &engine.stop, |stream| {
        let engine = Arc::clone(&engine);
        async move {
            // An error means that the caller closed the connection.
            let _ = connection(stream, &engine).await;
        }
    });
    let peers = accept(listeners.peers, &engine.stop, |stream| {
        let engine = Arc::clone(&engine);
        async move { links::read(stream, |envelope| engine.deliver(envelope)).await }
    });
    let bootstrap = async {
        let Some(listener) = listeners.bootstrap else { return engine.stop.cancelled().await };
        let serve = |stream| {
            let engine = Arc::clone(&engine);
            async move {
                let _ = bootstrap_connection(stream, &engine).await;
            }
        };
        accept(listener, &engine.stop, serve).await;
    };
    tokio::join!(api, peers, bootstrap);
}

async fn bootstrap_connection(stream: TcpStream, engine: &SglangEngine) -> io::Result<()> {
    let mut connection = ServerConnection::new(stream);
    while let Some(request) = connection.next(HttpRequest::read).await? {
        connection.send_or_gone(&bootstrap::answer(engine, &request)).await?;
        if request.closes {
            return Ok(());
        }
    }
    Ok(())
}

async fn connection(stream: TcpStream, engine: &Arc<SglangEngine>) -> io::Result<()> {
    let mut connection = ServerConnection::new(stream);
    while let Some(request) = connection.next(HttpRequest::read).await? {
        match GeneratePath::at(&request.path).filter(|_| request.posts) {
            Some(path) => generate::answer(engine, &mut connection, path, &request).await?,
            None => {
                let reply = tokio::select! {
                    reply = other(engine, &request) => reply,
                    () = connection.wait_until_closed(), if request.path == "/debug/kv/events" => return Ok(()),
                };
                connection.send_or_gone(&reply).await?;
            }
        }
        if request.closes {
            return Ok(());
        }
    }
    Ok(())
}

async fn other(engine: &Arc<SglangEngine>, request: &HttpRequest) -> Vec<u8> {
    let ok = |body: Value| json_reply(body.to_string().as_bytes());
    let text = |body: String| {
        reply(
            200,
            &[("content-type", "text/plain; version=0.0.4; charset=utf-8".to_owned())],
            body.as_bytes(),
        )
    };
    match (request.posts, request.path.as_str()) {
        (false, "/ready" | "/ping") => reply(200, &[], b""),
        (false, "/health" | "/health_generate") => {
            // A request of one token through a fake bootstrap server. The answer is looked for every second.
            engine.generate_for_health();
            tokio::time::sleep(engine.waits.health).await;
            reply(200, &[], b"")
        }
        (false, "/server_info" | "/get_server_info") => ok(pages::server_info(engine)),
        (false, "/model_info" | "/get_model_info") => ok(pages::model_info(engine)),
        (false, "/v1/models") => ok(pages::models(engine)),
        (false, "/v1/loads") => match pages::loads(engine, request) {
            Ok(pages::LoadsPage::Json(page)) => ok(page),
            Ok(pages::LoadsPage::Prometheus(page)) => text(page),
            Err(why) => {
                let body = json!({"detail": why}).to_string();
                reply(400, &[("content-type", "application/json".to_owned())], body.as_bytes())
            }
        },
        (false, "/metrics") => text(pages::metrics(engine)),
        (false, "/debug/kv") => ok(pages::debug_kv(engine)),
        (false, "/debug/kv/events") => {
            let page = events_page(&engine.log, &pages::identity(engine), request).await;
            page.unwrap_or_else(|error| refusal(&error))
        }
        (true, "/abort_request") => {
            abort(engine, &request.body);
            reply(200, &[], b"")
        }
        _ => {
            let body = json!({"detail": "Not Found"}).to_string();
            reply(404, &[("content-type", "application/json".to_owned())], body.as_bytes())
        }
    }
}

/// Any body is answered by 200. One without a `rid` has no effect.
fn abort(engine: &Arc<SglangEngine>, body: &[u8]) {
    let fields: Value = serde_json::from_slice(body).unwrap_or_default();
    if fields["abort_all"] == true {
        engine.abort_prefix("", EndCause::Verb);
    } else if let Some(rid) = fields["rid"].as_str() {
        engine.abort(rid, EndCause::Verb);
    }
}
