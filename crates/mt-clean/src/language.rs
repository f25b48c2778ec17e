//! The language of a text, by the trigrams of `whatlang`, which are in the program.

use whatlang::{Lang, detect};

use crate::error::{CleanError, Result};

/// The most bytes of a text that are looked at.
const MOST: usize = 8 << 10;

/// The code of a text's language in ISO 639-3, and the confidence in it from 0 to 1.
pub fn language(text: &str) -> Option<(&'static str, f64)> {
    let mut end = text.len().min(MOST);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    detect(&text[..end]).map(|found| (found.lang().code(), found.confidence()))
}

/// The code of a language that is named by its code or its English name.
///
/// # Errors
/// The language is not known.
pub fn code_of(name: &str) -> Result<&'static str> {
    let wanted = name.to_lowercase();
    let found =
        Lang::all().iter().find(|lang| lang.code() == wanted || lang.eng_name().to_lowercase() == wanted);
    found.map(|lang| lang.code()).ok_or_else(|| {
        let known: Vec<&str> = Lang::all().iter().map(|lang| lang.code()).collect();
        CleanError::Options(format!(
            "`{name}` is no known language\nhint: name it in English, or by one of the codes {}",
            known.join(", ")
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn languages_are_found() {
        for (text, expected) in [
            ("The miller walked along the river in the morning and looked for his boat.", "eng"),
            ("Der Müller ging am Morgen den Fluss entlang und suchte sein Boot.", "deu"),
            ("Le meunier marchait le matin au bord de la rivière et cherchait son bateau.", "fra"),
            ("El molinero caminaba por la mañana junto al río y buscaba su barca perdida.", "spa"),
            ("Il mugnaio camminava la mattina lungo il fiume e cercava la sua barca perduta.", "ita"),
            ("De molenaar liep die ochtend langs de rivier en zocht naar zijn verdwenen boot.", "nld"),
            ("Młynarz szedł rano brzegiem rzeki i szukał swojej zaginionej łodzi.", "pol"),
            ("Myllyäri käveli aamulla joen vartta ja etsi kadonnutta venettään.", "fin"),
            ("Değirmenci sabahleyin nehir boyunca yürüdü ve kayıp teknesini aradı.", "tur"),
            ("Утром мельник шёл вдоль реки и искал свою лодку.", "rus"),
            ("Вранці мірошник ішов уздовж річки й шукав свій човен.", "ukr"),
            ("Ο μυλωνάς περπατούσε το πρωί δίπλα στο ποτάμι και έψαχνε τη βάρκα του.", "ell"),
            ("粉屋は朝、川に沿って歩き、自分の舟を探していました。", "jpn"),
            ("磨坊主早上沿着河边走，寻找他的小船。", "cmn"),
            ("방앗간 주인은 아침에 강을 따라 걸으며 자기 배를 찾았다.", "kor"),
        ] {
            assert_eq!(language(text).map(|(code, _)| code), Some(expected), "{text}");
        }
        assert_eq!(language("12 34"), None);
        assert_eq!((code_of("eng").unwrap(), code_of("German").unwrap()), ("eng", "deu"));
        assert!(code_of("Klingon").unwrap_err().to_string().contains("eng"));
    }
}
