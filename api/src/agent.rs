//! Requests to the agent in a sandbox: its health, and the certificate authority of the egress proxy.

use std::{path::Path, time::Duration};

use envd::{ENVD_PORT, InitRequest};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::UnixStream,
    time::timeout,
};

/// Whether the agent behind the vsock socket at `vsock` responds to `GET /health` with a success status within the time
/// `within`. Reads only the status line of the response.
pub(crate) async fn is_healthy(vsock: &Path, within: Duration) -> bool {
    matches!(timeout(within, ask(vsock)).await, Ok(Ok(true)))
}

/// Makes the guest trust the certificate authority `pem` in addition to those of its system. Returns whether the agent
/// has done so within the time `within`.
pub(crate) async fn trusts(vsock: &Path, pem: &str, within: Duration) -> bool {
    let init = InitRequest {
        ca_bundle: Some(pem.to_owned()),
        ..InitRequest::default()
    };
    let Ok(body) = serde_json::to_string(&init) else {
        return false;
    };
    let request = format!(
        "POST /init HTTP/1.1\r\nHost: sandbox\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{body}",
        body.len()
    );
    matches!(
        timeout(within, succeeds(vsock, &request)).await,
        Ok(Ok(true))
    )
}

async fn ask(vsock: &Path) -> std::io::Result<bool> {
    let request = "GET /health HTTP/1.1\r\nHost: sandbox\r\nConnection: close\r\n\r\n";
    succeeds(vsock, request).await
}

/// Whether the agent responds to a request with a success status.
async fn succeeds(vsock: &Path, request: &str) -> std::io::Result<bool> {
    let mut stream = UnixStream::connect(vsock).await?;
    let connect = format!("CONNECT {ENVD_PORT}\n");
    stream.write_all(connect.as_bytes()).await?;
    if !read_line(&mut stream).await?.starts_with("OK ") {
        return Ok(false);
    }
    stream.write_all(request.as_bytes()).await?;
    let status = read_line(&mut stream).await?;
    Ok(status.starts_with("HTTP/1.1 2"))
}

/// Reads a line, or the first 128 bytes of a longer line. Reads byte by byte, so that data after the line stays in the
/// socket.
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
            // Keeps the connection open: silence must not look like end of file.
            let _ = stream.read(&mut buffer).await;
        });
        let healthy = is_healthy(&path, Duration::from_millis(300)).await;
        server.abort();
        healthy
    }

    #[tokio::test]
    async fn only_a_success_status_in_time_means_healthy() {
        assert!(answer(&["OK 1\n", "HTTP/1.1 204 No Content\r\n"]).await);
        assert!(!answer(&["OK 1\n", "HTTP/1.1 500 Oh\r\n"]).await);
        assert!(!answer(&["OK 1\n"]).await);
        assert!(!answer(&["no such port\n"]).await);
        assert!(!is_healthy(Path::new("/nonexistent"), Duration::from_secs(1)).await);
        assert!(!trusts(Path::new("/nonexistent"), "PEM", Duration::from_secs(1)).await);
    }
}
