"""The official openai client: chats and responses, whole and streamed, with a loop of tools."""
import json

import pytest

openai = pytest.importorskip("openai", reason="the package openai is not installed")

WEATHER = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOL = {"type": "function", "name": "get_weather", "description": "The weather of a city", "parameters": WEATHER, "strict": False}
CHAT_TOOL = {"type": "function", "function": {"name": "get_weather", "description": "The weather of a city", "parameters": WEATHER}}


def client_of(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="secret-key", max_retries=0)


def run_tool(arguments):
    return f"18 degrees in {json.loads(arguments)['city']}"


def create(client, stream, **fields):
    """One response; of a stream its last event, after checking every other one."""
    if not stream:
        return client.responses.create(**fields)
    texts, arguments, items, last = {}, {}, {}, None
    with client.responses.create(stream=True, **fields) as events:
        for number, event in enumerate(events):
            assert event.sequence_number == number
            last = event
            if event.type == "response.output_item.done":
                items[event.output_index] = event.item
            elif event.type in ("response.output_text.delta", "response.reasoning_text.delta"):
                texts[event.output_index] = texts.get(event.output_index, "") + event.delta
            elif event.type == "response.function_call_arguments.delta":
                arguments[event.output_index] = arguments.get(event.output_index, "") + event.delta
    assert last.type in ("response.completed", "response.incomplete")
    assert [items[i] for i in range(len(items))] == last.response.output
    for index, item in enumerate(last.response.output):
        if item.type == "function_call":
            assert arguments[index] == item.arguments
        elif item.content and item.content[0].text:
            assert texts[index] == item.content[0].text
    return last.response


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stateful", [False, True], ids=["items", "previous_response_id"])
@pytest.mark.parametrize("question, cities", [("What is the weather in Paris", ["Paris"]),
                                              ("What is the weather in Paris and Rome", ["Paris", "Rome"])])
def test_tool_loop(scripted, stream, stateful, question, cities):
    client = client_of(scripted)
    conversation = [{"role": "user", "content": question}]
    common = {"model": "scripted", "tools": [TOOL], "instructions": "Use tools."}
    response = create(client, stream, input=conversation, **common)
    calls = [item for item in response.output if item.type == "function_call"]
    assert [json.loads(call.arguments) for call in calls] == [{"city": city} for city in cities]
    assert response.status == "completed" and len({call.call_id for call in calls}) == len(cities)
    if len(cities) == 1:
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert response.output[0].content[0].text == "I should look."
        assert response.output_text == "Let me look."
        assert response.usage.output_tokens_details.reasoning_tokens > 0
    results = [{"type": "function_call_output", "call_id": call.call_id, "output": run_tool(call.arguments)} for call in calls]
    if stateful:
        answer = create(client, stream, input=results, previous_response_id=response.id, **common)
    else:
        answer = create(client, stream, input=conversation + response.output + results, store=False, **common)
    assert answer.output_text == f"The tool says: 18 degrees in {cities[-1]}"
    assert answer.usage.input_tokens > response.usage.input_tokens
    assert answer.usage.input_tokens_details.cached_tokens == 2


@pytest.mark.parametrize("stream", [False, True])
def test_tool_loop_of_a_chat(scripted, stream):
    client = client_of(scripted)
    messages = [{"role": "user", "content": "What is the weather in Paris"}]
    for turn in range(3):
        if stream:
            with client.chat.completions.stream(model="scripted", messages=messages, tools=[CHAT_TOOL]) as events:
                for _ in events:
                    pass
                choice = events.get_final_completion().choices[0]
        else:
            choice = client.chat.completions.create(model="scripted", messages=messages, tools=[CHAT_TOOL]).choices[0]
        if choice.finish_reason != "tool_calls":
            break
        messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
        for call in choice.message.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": run_tool(call.function.arguments)})
    assert turn == 1 and choice.message.content == "The tool says: 18 degrees in Paris"


def test_stream_helper(scripted):
    with client_of(scripted).responses.stream(model="scripted", input="What is the weather in Paris", tools=[TOOL]) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_response()
    assert {"response.output_text.delta", "response.function_call_arguments.done", "response.completed"} <= kinds
    assert final.output[-1].name == "get_weather"


def test_stored_responses(scripted):
    client = client_of(scripted)
    made = client.responses.create(model="scripted", input="hi", metadata={"a": "b"})
    assert client.responses.retrieve(made.id) == made and made.metadata == {"a": "b"}
    items = client.responses.input_items.list(made.id)
    assert [item.content[0].text for item in items] == ["hi"]
    counted = client.responses.input_tokens.count(model="scripted", input="hi")
    assert counted.input_tokens == made.usage.input_tokens
    referred = client.responses.create(model="scripted", input=[{"type": "item_reference", "id": made.output[0].id},
                                                                {"role": "user", "content": "again"}])
    assert referred.usage.input_tokens > made.usage.input_tokens
    client.responses.delete(made.id)
    for call in (lambda: client.responses.retrieve(made.id), lambda: client.responses.delete(made.id),
                 lambda: client.responses.create(model="scripted", input="x", previous_response_id=made.id)):
        with pytest.raises(openai.NotFoundError):
            call()


def test_a_thousand_responses(scripted):
    """A conversation of a thousand responses, each continuing the one before it, within the store's budget."""
    client = client_of(scripted)
    previous = None
    for turn in range(1000):
        previous = client.responses.create(model="scripted", input=f"turn {turn}", previous_response_id=previous).id
    again = client.responses.create(model="scripted", input="the end", previous_response_id=previous)
    assert again.output_text == "Hello! You said: the end"
    assert again.usage.input_tokens > 10_000
    metrics = client.with_options(base_url=scripted.url).get("/metrics", cast_to=str)
    values = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
    assert 0 < float(values["oscar_response_store_bytes"]) <= 8 << 20


def test_errors(scripted):
    client = client_of(scripted)
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(model="scripted", input="x", tools=[{"type": "file_search", "vector_store_ids": []}])
    assert error.value.code == "unsupported_parameter" and error.value.param == "tools[0].type"
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="other", input="x")
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model="scripted", input=[{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}])


@pytest.mark.parametrize("stream", [False, True])
def test_demo_model(demo, stream):
    """The demo model knows no tools: the loop ends with its first answer, and what was called elsewhere can be told to it."""
    client = client_of(demo)
    response = create(client, stream, model="demo", input="What is the capital of France?", tools=[TOOL], temperature=0,
                      max_output_tokens=24)
    assert response.output and response.usage.output_tokens > 0
    told = [{"role": "user", "content": "What is the capital of France?"},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": "{\"city\": \"Paris\"}"},
            {"type": "function_call_output", "call_id": "c1", "output": "18 degrees"}]
    answer = create(client, stream, model="demo", input=told, tools=[TOOL], temperature=0, max_output_tokens=24)
    assert answer.output and answer.usage.input_tokens > response.usage.input_tokens
    same = create(client, not stream, model="demo", input=told, tools=[TOOL], temperature=0, max_output_tokens=24)
    assert [item.content for item in same.output] == [item.content for item in answer.output]
    more = create(client, stream, model="demo", input="And of Italy?", previous_response_id=response.id, temperature=0,
                  max_output_tokens=8)
    assert more.usage.input_tokens > response.usage.input_tokens
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=demo.url + "/v1", api_key="wrong", max_retries=0).responses.create(model="demo", input="x")


CITIES = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"], "additionalProperties": False}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}], ids=["required", "named"])
def test_tool_loop_of_the_demo_model(demanding, stream, choice):
    """It calls because it must: call, result, answer."""
    client = client_of(demanding)
    common = {"model": "demo", "tools": [{**TOOL, "parameters": CITIES}], "temperature": 0, "max_output_tokens": 200}
    response = create(client, stream, input="What is the weather in Paris?", tool_choice=choice, parallel_tool_calls=False, **common)
    (call,) = [item for item in response.output if item.type == "function_call"]
    assert call.name == "get_weather" and json.loads(call.arguments)["city"] in ("Paris", "Rome")
    assert response.status == "completed"
    answer = create(client, stream, input=[{"type": "function_call_output", "call_id": call.call_id, "output": run_tool(call.arguments)}],
                    previous_response_id=response.id, tool_choice="none", **{**common, "max_output_tokens": 24})
    assert answer.output and {item.type for item in answer.output} <= {"reasoning", "message"}
    assert answer.usage.output_tokens > 0 and answer.usage.input_tokens > response.usage.input_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_tool_loop_of_a_chat_with_the_demo_model(demanding, stream):
    client = client_of(demanding)
    tools = [{"type": "function", "function": {"name": "get_weather", "description": "The weather of a city", "parameters": CITIES}}]
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]

    def ask(**fields):
        fields = {"model": "demo", "messages": messages, "tools": tools, "temperature": 0, **fields}
        if not stream:
            return client.chat.completions.create(**fields).choices[0]
        with client.chat.completions.stream(**fields) as events:
            for _ in events:
                pass
            return events.get_final_completion().choices[0]

    choice = ask(tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    assert choice.finish_reason == "tool_calls" and len(choice.message.tool_calls) == 1
    call = choice.message.tool_calls[0]
    messages.append(choice.message.model_dump(exclude_none=True, exclude={"parsed"}))
    messages.append({"role": "tool", "tool_call_id": call.id, "content": run_tool(call.function.arguments)})
    answer = ask(tool_choice="none", max_tokens=24)
    assert not answer.message.tool_calls and answer.finish_reason in ("stop", "length")
    assert answer.message.content or answer.message.reasoning_content
