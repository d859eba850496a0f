//! Signatures of tokens, by ring. `jsonwebtoken` brings no cryptography of its own here, because its backends need
//! cmake or an RSA implementation with an open advisory (RUSTSEC-2023-0071).

use std::sync::Once;

use jsonwebtoken::crypto::{CryptoProvider, JwtSigner, JwtVerifier, KeyUtils};
use jsonwebtoken::errors::{ErrorKind, Result, new_error};
use jsonwebtoken::signature::{Error, Verifier};
use jsonwebtoken::{Algorithm, DecodingKey, DecodingKeyKind, EncodingKey};
use ring::signature::{
    self, RsaParameters, RsaPublicKeyComponents, UnparsedPublicKey, VerificationAlgorithm,
};

static PROVIDER: CryptoProvider = CryptoProvider {
    signer_factory: no_signer,
    verifier_factory: verifier,
    key_utils: KeyUtils::new_unimplemented(),
};

/// Makes ring the cryptography of `jsonwebtoken` in this process.
pub(super) fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        // An error would mean that it is installed already.
        let _ = PROVIDER.install_default();
    });
}

/// A check of signatures with one key and one algorithm.
struct RingVerifier {
    algorithm: Algorithm,
    key: DecodingKey,
}

impl Verifier<Vec<u8>> for RingVerifier {
    fn verify(&self, message: &[u8], signature: &Vec<u8>) -> std::result::Result<(), Error> {
        let checked = match (self.key.kind(), means(self.algorithm)) {
            (DecodingKeyKind::RsaModulusExponent { n, e }, Some(Means::Rsa(parameters))) => {
                RsaPublicKeyComponents { n, e }.verify(parameters, message, signature)
            }
            (DecodingKeyKind::SecretOrDer(point), Some(Means::Curve(algorithm))) => {
                UnparsedPublicKey::new(algorithm, point).verify(message, signature)
            }
            (DecodingKeyKind::RsaModulusExponent { .. } | DecodingKeyKind::SecretOrDer(_), _) => {
                return Err(Error::new());
            }
        };
        checked.map_err(|_| Error::new())
    }
}

impl JwtVerifier for RingVerifier {
    fn algorithm(&self) -> Algorithm {
        self.algorithm
    }
}

enum Means {
    Rsa(&'static RsaParameters),
    Curve(&'static dyn VerificationAlgorithm),
}

/// ring's check for an algorithm; `None` for secrets shared with the issuer, which would let every router sign.
fn means(algorithm: Algorithm) -> Option<Means> {
    Some(match algorithm {
        Algorithm::RS256 => Means::Rsa(&signature::RSA_PKCS1_2048_8192_SHA256),
        Algorithm::RS384 => Means::Rsa(&signature::RSA_PKCS1_2048_8192_SHA384),
        Algorithm::RS512 => Means::Rsa(&signature::RSA_PKCS1_2048_8192_SHA512),
        Algorithm::PS256 => Means::Rsa(&signature::RSA_PSS_2048_8192_SHA256),
        Algorithm::PS384 => Means::Rsa(&signature::RSA_PSS_2048_8192_SHA384),
        Algorithm::PS512 => Means::Rsa(&signature::RSA_PSS_2048_8192_SHA512),
        Algorithm::ES256 => Means::Curve(&signature::ECDSA_P256_SHA256_FIXED),
        Algorithm::ES384 => Means::Curve(&signature::ECDSA_P384_SHA384_FIXED),
        Algorithm::EdDSA => Means::Curve(&signature::ED25519),
        _ => return None,
    })
}

fn verifier(algorithm: &Algorithm, key: &DecodingKey) -> Result<Box<dyn JwtVerifier>> {
    if key.family() != algorithm.family() || means(*algorithm).is_none() {
        return Err(new_error(ErrorKind::InvalidAlgorithm));
    }
    Ok(Box::new(RingVerifier { algorithm: *algorithm, key: key.clone() }))
}

fn no_signer(_: &Algorithm, _: &EncodingKey) -> Result<Box<dyn JwtSigner>> {
    Err(new_error(ErrorKind::UnsupportedAlgorithm))
}

#[cfg(test)]
mod tests {
    use jsonwebtoken::crypto::verify;

    use super::*;

    /// RFC 7515, appendix A.2 (RS256) and A.3 (ES256), RFC 8037, appendix A.4 (EdDSA).
    #[test]
    fn the_examples_of_the_rfcs_are_verified() {
        install();
        const CLAIMS: &str =
            "eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ";
        let rsa = DecodingKey::from_rsa_components(
            "ofgWCuLjybRlzo0tZWJjNiuSfb4p4fAkd_wWJcyQoTbji9k0l8W26mPddxHmfHQp-Vaw-4qPCJrcS2mJPMEzP1Pt0Bm4d4QlL-yRT-SFd2lZS-pCgNMsD1W_YpRPEwOWvG6b32690r2jZ47soMZo9wGzjb_7OMg0LOL-bSf63kpaSHSXndS5z5rexMdbBYUsLA9e-KXBdQOS-UTo7WTBEMa2R2CapHg665xsmtdVMTBQY4uDZlxvb3qCo5ZwKh9kG4LT6_I5IhlJH7aGhyxXFvUK-DWNmoudF8NAco9_h9iaGNj8q2ethFkMLs91kzk2PAcDTW9gb54h4FRWyuXpoQ",
            "AQAB",
        );
        let ec = DecodingKey::from_ec_components(
            "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
            "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0",
        );
        let ed = DecodingKey::from_ed_components("11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo");
        let (rsa, ec, ed) = (rsa.expect("a key"), ec.expect("a key"), ed.expect("a key"));
        let cases = [
            (
                Algorithm::RS256,
                &rsa,
                format!("eyJhbGciOiJSUzI1NiJ9.{CLAIMS}"),
                "cC4hiUPoj9Eetdgtv3hF80EGrhuB__dzERat0XF9g2VtQgr9PJbu3XOiZj5RZmh7AAuHIm4Bh-0Qc_lF5YKt_O8W2Fp5jujGbds9uJdbF9CUAr7t1dnZcAcQjbKBYNX4BAynRFdiuB--f_nZLgrnbyTyWzO75vRK5h6xBArLIARNPvkSjtQBMHlb1L07Qe7K0GarZRmB_eSN9383LcOLn6_dO--xi12jzDwusC-eOkHWEsqtFZESc6BfI7noOPqvhJ1phCnvWh6IeYI2w9QOYEUipUTI8np6LbgGY9Fs98rqVt5AXLIhWkWywlVmtVrBp0igcN_IoypGlUPQGe77Rw",
            ),
            (
                Algorithm::ES256,
                &ec,
                format!("eyJhbGciOiJFUzI1NiJ9.{CLAIMS}"),
                "DtEhU3ljbEg8L38VWAfUAqOyKAM6-Xx-F4GawxaepmXFCgfTjDxw5djxLa8ISlSApmWQxfKTUJqPP3-Kg6NU1Q",
            ),
            (
                Algorithm::EdDSA,
                &ed,
                "eyJhbGciOiJFZERTQSJ9.RXhhbXBsZSBvZiBFZDI1NTE5IHNpZ25pbmc".to_owned(),
                "hgyY0il_MGCjP0JzlnLWG1PPOt7-09PGcvMg3AIbQR6dWbhijcNR4ki4iylGjg5BhVsPt9g7sVvpAr_MuM0KAg",
            ),
        ];
        for (algorithm, key, message, signature) in &cases {
            let of = |message: &str, key, algorithm| verify(signature, message.as_bytes(), key, algorithm);
            assert!(of(message, key, *algorithm).expect("an algorithm"), "{algorithm:?}");
            assert!(!of(&format!("{message}x"), key, *algorithm).expect("an algorithm"), "{algorithm:?}");
            for (other, other_key, _, _) in &cases {
                let accepted = of(message, other_key, *other).unwrap_or(false);
                assert_eq!(accepted, other == algorithm, "{algorithm:?} as {other:?}");
            }
        }
    }

    #[test]
    fn a_public_key_is_no_secret_of_an_hmac() {
        install();
        let rsa = DecodingKey::from_rsa_components("AQAB", "AQAB").expect("a key");
        let secret = DecodingKey::from_secret(b"AQAB");
        for (algorithm, key) in
            [(Algorithm::HS256, &rsa), (Algorithm::HS256, &secret), (Algorithm::RS256, &secret)]
        {
            assert!(verify("AQAB", b"x", key, algorithm).is_err(), "{algorithm:?}");
        }
        assert!(!verify("AQAB", b"x", &rsa, Algorithm::RS256).expect("a key"), "24 bits are no RSA key");
    }
}
