//! The connections of a server: their number, the time that clients may take, and the threads that answer.

use std::{
    convert::Infallible,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::{Router, body::Body};
use hyper::{Request, Response, body::Incoming, server::conn::http1, service::Service};
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    service::TowerToHyperService,
};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf},
    net::{TcpListener, TcpStream},
    runtime::Handle,
    sync::{OwnedSemaphorePermit, Semaphore, watch},
    task::{JoinHandle, JoinSet},
    time::Sleep,
};

use crate::{
    app::{App, is_probe},
    error::ApiError,
    limits::ServerLimits,
    server::ServerEvent,
};

/// The number of refused clients that receive the reason at one time. Others only see that the connection ends.
const MAX_REFUSALS: usize = 64;
/// The time in which a refused client can read the reason.
const REFUSAL: Duration = Duration::from_secs(1);
/// The time before the next try when the process has no file descriptor left.
const OUT_OF_FILES: Duration = Duration::from_millis(50);

/// The routes of a server, as its connections call them. Operators' routes are answered by the thread of the connections,
/// which never waits for others, and all other work is that of the workers.
#[derive(Clone)]
pub struct Routes {
    router: TowerToHyperService<Router>,
    workers: Handle,
}

impl Routes {
    pub fn new(router: Router, workers: Handle) -> Self {
        Self { router: TowerToHyperService::new(router), workers }
    }
}

impl Service<Request<Incoming>> for Routes {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn call(&self, request: Request<Incoming>) -> Self::Future {
        let is_probe = is_probe(request.uri().path());
        let answering = self.router.call(request);
        if is_probe {
            return Box::pin(answering);
        }
        let task = Task(self.workers.spawn(answering));
        Box::pin(async {
            task.await.unwrap_or_else(|_| {
                let error = ApiError::internal("the server failed; this is a bug");
                Ok(error.response(&error.body()))
            })
        })
    }
}

/// A task that ends when nobody waits for it any more, as when a client goes.
struct Task<T>(JoinHandle<T>);

impl<T> Future for Task<T> {
    type Output = Result<T, tokio::task::JoinError>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.0).poll(context)
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Serves connections until `close` is ready, and returns when their responses have been sent.
pub async fn serve(listener: TcpListener, app: Arc<App>, routes: Routes, close: impl Future<Output = ()>) {
    let http = http(&app.limits);
    let places = Arc::new(Semaphore::new(app.limits.max_connections));
    let refusals = Arc::new(Semaphore::new(MAX_REFUSALS));
    let closing = watch::Sender::new(false);
    let mut open = JoinSet::new();
    let mut was_full = false;
    tokio::pin!(close);
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = &mut close => break,
        };
        while open.try_join_next().is_some() {}
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) if is_of_client(&error) => continue,
            Err(_) => {
                tokio::time::sleep(OUT_OF_FILES).await;
                continue;
            }
        };
        // Tokens are small packets, which must not wait for each other. Without the option, answers are only slower.
        let _ = stream.set_nodelay(true);
        match places.clone().try_acquire_owned() {
            Ok(place) => {
                was_full = false;
                let stream = Impatient::new(stream, app.limits.write_time);
                let connection = http.serve_connection(TokioIo::new(stream), routes.clone());
                open.spawn(run(connection, closing.subscribe(), place));
            }
            Err(_) => {
                if !std::mem::replace(&mut was_full, true) {
                    app.report(ServerEvent::Full { max_connections: app.limits.max_connections });
                }
                if let Ok(refusal) = refusals.clone().try_acquire_owned() {
                    open.spawn(refuse(stream, refusal));
                }
            }
        }
    }
    drop(listener);
    closing.send_replace(true);
    while open.join_next().await.is_some() {}
}

fn http(limits: &ServerLimits) -> http1::Builder {
    let mut builder = http1::Builder::new();
    builder
        .timer(TokioTimer::new())
        .header_read_timeout(limits.head_time)
        .max_header_size(limits.max_head)
        // Bodies are read in pieces of at most this size. The head has to fit, too.
        .max_buf_size((2 * limits.max_head).max(64 << 10));
    builder
}

type Connection = http1::Connection<TokioIo<Impatient<TcpStream>>, Routes>;

async fn run(connection: Connection, mut closing: watch::Receiver<bool>, place: OwnedSemaphorePermit) {
    tokio::pin!(connection);
    let is_closing = async {
        // The sender lives as long as the server.
        let _ = closing.wait_for(|closing| *closing).await;
    };
    tokio::select! {
        // Errors are those of clients that break the protocol, are too slow, or go.
        _ = connection.as_mut() => return,
        () = is_closing => connection.as_mut().graceful_shutdown(),
    }
    let _ = connection.await;
    drop(place);
}

/// Tells a client that the server has no room for its connection.
async fn refuse(mut stream: TcpStream, refusal: OwnedSemaphorePermit) {
    let error = ApiError::crowded();
    let body = error.body().to_string();
    let head = "HTTP/1.1 503 Service Unavailable\r\ncontent-type: application/json\r\nretry-after: 1\r\nconnection: close";
    let response = format!("{head}\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let told = async {
        stream.write_all(response.as_bytes()).await?;
        stream.shutdown().await?;
        // A connection that is closed with unread bytes is reset, and the response can be lost.
        let mut unread = [0; 1024];
        while stream.read(&mut unread).await? > 0 {}
        Ok::<(), io::Error>(())
    };
    // The client has gone, or does not care.
    let _ = tokio::time::timeout(REFUSAL, told).await;
    drop(refusal);
}

/// Whether the client went before it was accepted.
fn is_of_client(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}

/// A stream that fails if its peer takes nothing for some time, so that clients which never read do not hold their
/// connections and answers for good.
struct Impatient<S> {
    stream: S,
    time: Duration,
    /// Set while the peer takes nothing.
    limit: Option<Pin<Box<Sleep>>>,
}

impl<S> Impatient<S> {
    fn new(stream: S, time: Duration) -> Self {
        Self { stream, time, limit: None }
    }

    fn watch<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.limit = None;
            return written;
        }
        let time = self.time;
        let limit = self.limit.get_or_insert_with(|| Box::pin(tokio::time::sleep(time)));
        limit.as_mut().poll(context).map(|()| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Impatient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Impatient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, bytes);
        self.watch(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.watch(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.watch(context, shut)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn clients_that_read_nothing_are_left() {
        let (mut client, server) = tokio::io::duplex(16);
        let mut server = Impatient::new(server, Duration::from_millis(100));
        server.write_all(&[1; 16]).await.unwrap();
        // A client that reads a little in time is only slow.
        for _ in 0..3 {
            let (written, read) = tokio::join!(server.write_all(&[2; 4]), async {
                tokio::time::sleep(Duration::from_millis(60)).await;
                client.read_exact(&mut [0; 4]).await
            });
            written.unwrap();
            read.unwrap();
        }
        let error = server.write_all(&[3; 4]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
