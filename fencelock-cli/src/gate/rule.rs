//! Which requests need a token, which resource they belong to, and what a token looks like.

use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use hyper::{Method, Uri};
use std::str::FromStr;

/// The longest name of a resource that a header may give, in bytes.
const NAME_MAX: usize = 512;

/// What a request is part of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Resource {
    /// Every path is a resource of its own.
    Path,
    /// The first so many parts of the path.
    Parts(usize),
    /// What this header says.
    Header(HeaderName),
    /// All requests belong to one resource.
    One,
}

impl FromStr for Resource {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = || {
            format!("{text:?} is no resource rule; write path, path:2 (the first two parts), header:X-Resource, or one")
        };
        match text.split_once(':') {
            None if text == "path" => Ok(Resource::Path),
            None if text == "one" => Ok(Resource::One),
            Some(("path", count)) => match count.parse() {
                Ok(count @ 1..=64) => Ok(Resource::Parts(count)),
                _ => Err(wrong()),
            },
            Some(("header", name)) => name.parse().map(Resource::Header).map_err(|_| wrong()),
            _ => Err(wrong()),
        }
    }
}

/// Which requests need a token, and for what.
#[derive(Debug)]
pub(crate) struct Rule {
    pub(crate) resource: Resource,
    /// Canonical paths; requests below one of them need a token.
    pub(crate) protect: Vec<String>,
    /// GET, HEAD and OPTIONS need none.
    pub(crate) reads_pass: bool,
    pub(crate) header: HeaderName,
}

/// What the rule says of a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Demand {
    /// It passes as it is.
    None,
    /// It needs a token for this resource, and has this one.
    Token { resource: String, token: u64 },
}

/// Why a request is turned down before anything was looked up.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// 428
    NoToken,
    /// 400, and why.
    Malformed(String),
}

impl Rule {
    pub(crate) fn demand(&self, method: &Method, uri: &Uri, headers: &HeaderMap) -> Result<Demand, Refusal> {
        let path = canonical(uri.path());
        if !self.protect.iter().any(|prefix| is_below(&path, prefix)) {
            return Ok(Demand::None);
        }
        let token = match token(headers, &self.header)? {
            Some(token) => token,
            // A read that shows a token is checked like any other request: that is how a holder announces itself.
            None if self.reads_pass && is_read(method) => return Ok(Demand::None),
            None => return Err(Refusal::NoToken),
        };
        Ok(Demand::Token { resource: self.name(path, headers)?, token })
    }

    fn name(&self, path: String, headers: &HeaderMap) -> Result<String, Refusal> {
        match &self.resource {
            Resource::Path => Ok(path),
            Resource::One => Ok("*".to_owned()),
            Resource::Parts(count) => {
                let parts: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).take(*count).collect();
                Ok(format!("/{}", parts.join("/")))
            }
            Resource::Header(name) => {
                let value = single(headers, name)?.ok_or_else(|| {
                    Refusal::Malformed(format!("the header {name}, which names the resource, is missing"))
                })?;
                let text = std::str::from_utf8(value.as_bytes()).unwrap_or_default().trim();
                match text.len() {
                    1..=NAME_MAX => Ok(text.to_owned()),
                    _ => Err(Refusal::Malformed(format!(
                        "the header {name} must name the resource in 1 to {NAME_MAX} bytes of UTF-8"
                    ))),
                }
            }
        }
    }
}

fn is_read(method: &Method) -> bool {
    [Method::GET, Method::HEAD, Method::OPTIONS].contains(method)
}

fn is_below(path: &str, prefix: &str) -> bool {
    prefix == "/" || path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
}

fn single<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a HeaderValue>, Refusal> {
    let mut values = headers.get_all(name).iter();
    match (values.next(), values.next()) {
        (value, None) => Ok(value),
        _ => Err(Refusal::Malformed(format!("the header {name} stands there more than once"))),
    }
}

/// The token of a request: decimal digits of a 64-bit number, and nothing else.
fn token(headers: &HeaderMap, name: &HeaderName) -> Result<Option<u64>, Refusal> {
    let Some(value) = single(headers, name)? else { return Ok(None) };
    let digits = value.as_bytes();
    let plain = (1..=20).contains(&digits.len())
        && digits.iter().all(u8::is_ascii_digit)
        && (digits[0] != b'0' || digits.len() == 1);
    let number = std::str::from_utf8(digits).ok().filter(|_| plain).and_then(|digits| digits.parse().ok());
    number.map(Some).ok_or_else(|| {
        Refusal::Malformed(format!(
            "the header {name} must be a whole number from 0 to {}, in decimal digits",
            u64::MAX
        ))
    })
}

/// One spelling for all spellings of a path: escapes resolved, `.` and `..` followed, doubled and trailing slashes dropped. Two paths that an upstream
/// might tell apart can become one resource, which is safe; one path never becomes two.
pub(crate) fn canonical(path: &str) -> String {
    if is_canonical(path) {
        return path.to_owned();
    }
    let decoded = decode(path);
    let mut parts: Vec<&str> = Vec::new();
    for part in decoded.split('/') {
        match part {
            "" | "." => {}
            ".." => _ = parts.pop(),
            part => parts.push(part),
        }
    }
    format!("/{}", parts.join("/"))
}

/// Whether a path is surely spelled so already; most are.
fn is_canonical(path: &str) -> bool {
    let plain = |byte: &u8| !matches!(byte, b'%' | b'\\');
    let turns = |pair: &[u8]| matches!(pair, b"//" | b"/.");
    let bytes = path.as_bytes();
    bytes.len() > 1
        && bytes.starts_with(b"/")
        && !bytes.ends_with(b"/")
        && bytes.iter().all(plain)
        && !bytes.windows(2).any(turns)
}

/// Resolves escapes until there is none left: some servers do it twice.
fn decode(path: &str) -> String {
    let mut bytes = path.as_bytes().to_vec();
    loop {
        let mut out = Vec::with_capacity(bytes.len());
        let mut at = 0;
        while at < bytes.len() {
            let digit = |at: usize| bytes.get(at).and_then(|byte| char::from(*byte).to_digit(16));
            match (bytes[at], digit(at + 1), digit(at + 2)) {
                (b'%', Some(high), Some(low)) => {
                    out.push(u8::try_from(high * 16 + low).unwrap_or_default());
                    at += 3;
                }
                // Some servers take it for a slash.
                (b'\\', ..) => {
                    out.push(b'/');
                    at += 1;
                }
                (byte, ..) => {
                    out.push(byte);
                    at += 1;
                }
            }
        }
        if out == bytes {
            return String::from_utf8_lossy(&bytes).into_owned();
        }
        bytes = out;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in list {
            headers.append(*name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        headers
    }

    fn rule(resource: &str) -> Rule {
        Rule {
            resource: resource.parse().unwrap(),
            protect: vec!["/".to_owned()],
            reads_pass: false,
            header: HeaderName::from_static("fencing-token"),
        }
    }

    fn ask(rule: &Rule, method: &Method, uri: &str, list: &[(&'static str, &str)]) -> Result<Demand, Refusal> {
        rule.demand(method, &uri.parse().unwrap(), &headers(list))
    }

    #[test]
    fn a_token_is_a_plain_number_of_64_bits() {
        let rule = rule("one");
        for good in ["0", "7", "1731672000000000", "18446744073709551615"] {
            let token = good.parse().unwrap();
            let demand = ask(&rule, &Method::PUT, "/x", &[("fencing-token", good)]);
            assert_eq!(demand, Ok(Demand::Token { resource: "*".into(), token }));
        }
        let huge = "9".repeat(10_000);
        for bad in [
            "",
            " ",
            "-1",
            "+1",
            "1.5",
            "0x10",
            "1e3",
            "01",
            "18446744073709551616",
            "99999999999999999999",
            "1,2",
            "1 2",
            "٣",
            "abc",
            &huge,
        ] {
            let demand = ask(&rule, &Method::PUT, "/x", &[("fencing-token", bad)]);
            assert!(matches!(demand, Err(Refusal::Malformed(_))), "{bad:.30}: {demand:?}");
        }
        let twice = ask(&rule, &Method::PUT, "/x", &[("fencing-token", "1"), ("fencing-token", "2")]);
        assert!(matches!(twice, Err(Refusal::Malformed(_))));
        assert_eq!(ask(&rule, &Method::PUT, "/x", &[]), Err(Refusal::NoToken));
    }

    #[test]
    fn one_path_is_one_resource_however_it_is_spelled() {
        for spelling in [
            "/a/b",
            "/a/b/",
            "//a///b",
            "/a/./b",
            "/a/x/../b",
            "/%61/b",
            "/a%2Fb",
            "/a%252fb",
            "/../a/b",
            "/a/%2e/b",
            "/a\\b",
        ] {
            assert_eq!(canonical(spelling), "/a/b", "{spelling}");
        }
        assert_eq!(canonical("/"), "/");
        assert_eq!(canonical("*"), "/*");
        assert_ne!(canonical("/A"), canonical("/a"));
        assert_eq!(canonical("/100%"), "/100%");
        assert_eq!(canonical("/a/.hidden/b.c"), "/a/.hidden/b.c");
    }

    #[test]
    fn a_rule_says_which_resource() {
        let token: &[(&'static str, &str)] = &[("fencing-token", "1"), ("x-resource", "invoice 42")];
        let name = |rule: &str, uri: &str| match ask(&self::rule(rule), &Method::PUT, uri, token) {
            Ok(Demand::Token { resource, .. }) => resource,
            other => panic!("{other:?}"),
        };
        assert_eq!(name("path", "/b/k?sign=secret"), "/b/k");
        assert_eq!(name("path:1", "/b/k"), "/b");
        assert_eq!(name("path:2", "/b"), "/b");
        assert_eq!(name("one", "/b/k"), "*");
        assert_eq!(name("header:X-Resource", "/b/k"), "invoice 42");
        assert_eq!(name("path", "http://elsewhere/b"), "/b");
        assert!(matches!(
            ask(&rule("header:x-other"), &Method::PUT, "/", token),
            Err(Refusal::Malformed(text)) if text.contains("x-other")
        ));
        for bad in ["", "paths", "path:0", "path:x", "header:", "header:a b", "one:1"] {
            assert!(bad.parse::<Resource>().is_err(), "{bad}");
        }
    }

    #[test]
    fn what_is_not_protected_passes() {
        let mut rule = rule("path");
        rule.protect = vec!["/api".to_owned()];
        rule.reads_pass = true;
        assert_eq!(ask(&rule, &Method::PUT, "/apix", &[]), Ok(Demand::None));
        assert_eq!(ask(&rule, &Method::GET, "/api/x", &[]), Ok(Demand::None));
        assert_eq!(ask(&rule, &Method::PUT, "/api", &[]), Err(Refusal::NoToken));
        assert_eq!(ask(&rule, &Method::DELETE, "/x/../api/x", &[]), Err(Refusal::NoToken));
        let shown = ask(&rule, &Method::GET, "/api/x", &[("fencing-token", "3")]);
        assert_eq!(shown, Ok(Demand::Token { resource: "/api/x".into(), token: 3 }));
    }
}
