//! Ready command of a probe: an HTTP request to a port, or a connection to it.

use envd::ENVD_PORT;

/// Default path of a probe.
const USUAL_PATH: &str = "/health";

/// A script that succeeds once the port is ready. An HTTP server must return 2xx; for the default path, which it
/// need not implement, anything below 500. A server of another protocol must accept a connection. The agent's port
/// is not part of the guest's network; the agent itself runs the script, so it is ready.
pub(super) fn script(port: u16, path: Option<&str>) -> String {
    if port == ENVD_PORT {
        return "exit 0".to_owned();
    }
    let accepted = if path.is_some() { "2" } else { "[1-4]" };
    let path = path.unwrap_or(USUAL_PATH).replace('\'', "%27");
    format!(
        "trap '' PIPE
exec 3<>/dev/tcp/127.0.0.1/{port} || exit 1
printf 'GET %s HTTP/1.0\\r\\nHost: localhost\\r\\n\\r\\n' '{path}' >&3 2>/dev/null
IFS= read -r -t 2 line <&3
case $line in
HTTP/*' '{accepted}*) exit 0 ;;
HTTP/*) echo \"$line\"; exit 1 ;;
*) exit 0 ;;
esac"
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        io::{Read, Write},
        net::TcpListener,
        process::{Command, Stdio},
    };

    /// Whether the script succeeds against a server that gives this response.
    fn is_ready(answer: &'static str, path: Option<&str>) -> bool {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let server = std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            let (mut request, mut piece) = (Vec::new(), [0; 512]);
            while !request.ends_with(b"\r\n\r\n") {
                let length = peer.read(&mut piece).unwrap();
                request.extend(&piece[..length]);
            }
            peer.write_all(answer.as_bytes()).unwrap();
            String::from_utf8(request).unwrap()
        });
        let status = Command::new("/bin/bash")
            .args(["-c", &script(port, path)])
            .stdout(Stdio::null())
            .status()
            .unwrap();
        let request = server.join().unwrap();
        assert!(request.starts_with(&format!("GET {} HTTP/1.0\r\n", path.unwrap_or(USUAL_PATH))));
        status.success()
    }

    #[test]
    fn http_servers_must_succeed_and_others_must_accept() {
        assert!(is_ready("HTTP/1.1 204 No Content\r\n\r\n", Some("/up")));
        assert!(!is_ready("HTTP/1.1 404 Not Found\r\n\r\n", Some("/up")));
        assert!(is_ready("HTTP/1.1 404 Not Found\r\n\r\n", None));
        assert!(!is_ready("HTTP/1.1 503 Busy\r\n\r\n", None));
        assert!(is_ready("-ERR wrong number of arguments\r\n", None));
        assert!(is_ready("", Some("/up")));
    }

    #[test]
    fn the_agent_is_ready_although_no_port_of_the_guest_is_its_own() {
        let script = script(ENVD_PORT, Some("/health"));
        let mut bash = Command::new("/bin/bash");
        assert!(bash.args(["-c", &script]).status().unwrap().success());
    }

    #[test]
    fn a_closed_port_is_not_ready() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        drop(listener);
        let status = Command::new("/bin/bash")
            .args(["-c", &script(port, None)])
            .stderr(Stdio::null())
            .status();
        assert!(!status.unwrap().success());
    }
}
