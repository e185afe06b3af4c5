//! One question to a sandbox's agent: does it answer?

use std::{path::Path, time::Duration};

use api_types::envd::ENVD_PORT;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::timeout,
};

/// Whether the agent behind this vsock socket answers `GET /health` with success in time. What it says beyond the
/// first bytes is not read.
pub(crate) async fn is_healthy(vsock: &Path, within: Duration) -> bool {
    matches!(timeout(within, ask(vsock)).await, Ok(Ok(true)))
}

async fn ask(vsock: &Path) -> std::io::Result<bool> {
    let mut stream = UnixStream::connect(vsock).await?;
    let connect = format!("CONNECT {ENVD_PORT}\n");
    stream.write_all(connect.as_bytes()).await?;
    if !read_line(&mut stream).await?.starts_with("OK ") {
        return Ok(false);
    }
    let request = b"GET /health HTTP/1.1\r\nHost: sandbox\r\nConnection: close\r\n\r\n";
    stream.write_all(request).await?;
    let status = read_line(&mut stream).await?;
    Ok(status.starts_with("HTTP/1.1 2"))
}

/// A short line, byte by byte: what follows it is somebody else's.
async fn read_line(stream: &mut UnixStream) -> std::io::Result<String> {
    let mut line = String::new();
    while line.len() < 128 {
        match stream.read_u8().await? {
            b'\n' => break,
            byte => line.push(char::from(byte)),
        }
    }
    Ok(line)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::UnixListener;

    async fn answer(dialogue: &'static [&'static str]) -> bool {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("vsock");
        let listener = UnixListener::bind(&path).unwrap();
        let server = tokio::spawn(async move {
            let (mut stream, _) = listener.accept().await.unwrap();
            let mut buffer = [0; 512];
            for line in dialogue {
                let _ = stream.read(&mut buffer).await.unwrap();
                stream.write_all(line.as_bytes()).await.unwrap();
            }
            // Held open: an agent that says nothing more is no end of file.
            let _ = stream.read(&mut buffer).await;
        });
        let healthy = is_healthy(&path, Duration::from_millis(300)).await;
        server.abort();
        healthy
    }

    #[tokio::test]
    async fn only_a_success_in_time_is_healthy() {
        assert!(answer(&["OK 1\n", "HTTP/1.1 204 No Content\r\n"]).await);
        assert!(!answer(&["OK 1\n", "HTTP/1.1 500 Oh\r\n"]).await);
        assert!(!answer(&["OK 1\n"]).await);
        assert!(!answer(&["no such port\n"]).await);
        assert!(!is_healthy(Path::new("/nonexistent"), Duration::from_secs(1)).await);
    }
}
