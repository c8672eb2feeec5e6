import xml.etree.ElementTree as ET

from legroom.drawing.svg import Svg

NS = "{http://www.w3.org/2000/svg}"


def test_text_stays_text_and_is_escaped():
    page = Svg(100, "a <title> & more")
    page.text(1, 2, "5 < 6 & 7 > 3")
    root = ET.fromstring(page.render(50))
    assert root.find(f"{NS}text").text == "5 < 6 & 7 > 3"
    assert root.get("aria-label") == "a <title> & more"


def test_the_picture_follows_light_and_dark():
    assert "prefers-color-scheme: dark" in Svg(10, "x").render(10)


def test_boxes_carry_hover_texts():
    page = Svg(100, "x")
    page.box(0, 0, 10, 10, fill="blue", tip="weights: 1 GiB")
    root = ET.fromstring(page.render(50))
    assert root.find(f".//{NS}rect/{NS}title").text == "weights: 1 GiB"
